"""Runs Python on a framework's own thread as if it ran on the thread that traced the call."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import ctypes.util
from collections.abc import Callable, Iterator
from typing import Any

from polybridge.core.backend import Backend
from polybridge.core.errors import remember


def as_caller(backend: Backend) -> Callable[..., Any]:
    """Capture the calling thread's context variables and the backend's state.

    Returns:
        `call(fn, *args)`, which runs `fn` under what was captured, with IEEE denormals, and remembers what it raises.
    """
    context, state = contextvars.copy_context(), backend.state()

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        try:
            with denormals(), state():
                return context.copy().run(fn, *args)
        except BaseException as error:
            remember(error)
            raise

    return call


@contextlib.contextmanager
def denormals() -> Iterator[None]:
    """Compute with denormal numbers: TensorFlow's and XLA's threads flush them to zero, for whatever runs there."""
    if _fegetenv is None or _fesetenv is None:
        yield
        return
    saved = ctypes.create_string_buffer(_FENV_BYTES)
    _fegetenv(saved)
    _fesetenv(_FE_DFL_ENV)
    try:
        yield
    finally:
        _fesetenv(saved)


def _floating_point_environment() -> tuple[Any, Any]:
    """Find C's fegetenv and fesetenv where FE_DFL_ENV is known to be the constant -1 (glibc and musl)."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("m"))
        return (library.fegetenv, library.fesetenv) if ctypes.util.find_library("c") else (None, None)
    except (OSError, AttributeError, TypeError):
        return None, None


_FENV_BYTES = 128  # 32 on x86-64, 8 on arm64
_FE_DFL_ENV = ctypes.c_void_p(-1)
_fegetenv, _fesetenv = _floating_point_environment()
