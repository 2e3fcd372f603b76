"""Runs Python on a framework's own thread as if it ran on the thread that traced the call."""

from __future__ import annotations

import contextvars
import ctypes
import ctypes.util
import sys
from collections.abc import Callable
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
            with Denormals(), state():
                return context.copy().run(fn, *args)
        except BaseException as error:
            remember(error)
            raise

    return call


class Denormals:
    """Compute with denormal numbers: TensorFlow's and XLA's threads flush them to zero, for whatever runs there."""

    __slots__ = ("_saved",)

    def __enter__(self) -> None:
        if _fenv is not None:
            self._saved = _Environment()
            _fenv.fegetenv(self._saved)
            _fenv.fesetenv(_FE_DFL_ENV)

    def __exit__(self, *_: object) -> None:
        if _fenv is not None:
            _fenv.fesetenv(self._saved)


def _floating_point_environment() -> Any:
    """Return the C library with fegetenv and fesetenv, where FE_DFL_ENV is known to be -1: glibc and musl.

    It is called with the GIL held: to let it go and take it again would cost more than the call.
    """
    try:
        library = ctypes.PyDLL(ctypes.util.find_library("m")) if sys.platform == "linux" else None
        return library if hasattr(library, "fegetenv") and hasattr(library, "fesetenv") else None
    except OSError:
        return None


_Environment = ctypes.c_char * 128  # bytes; 32 are used on x86-64, 8 on arm64
_FE_DFL_ENV = ctypes.c_void_p(-1)
_fenv = _floating_point_environment()
