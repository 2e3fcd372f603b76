"""Runs Python on a framework's own thread as if it ran on the thread that traced the call."""

from __future__ import annotations

import contextvars
import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from typing import Any

from polybridge.core.backend import NOTHING, Backend
from polybridge.core.errors import remember


def as_caller(backend: Backend) -> Callable[..., Any]:
    """Capture the calling thread's context variables and the backend's state.

    Returns:
        `call(fn, *args)`, which runs `fn` under what was captured, with IEEE denormals, and remembers what it raises.
    """
    context, state = contextvars.copy_context(), backend.state()

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        flushing = None
        try:
            flushing = _compute_with_denormals()
            around = state()
            if around is NOTHING:
                return context.copy().run(fn, *args)
            with around:
                return context.copy().run(fn, *args)
        except BaseException as error:
            remember(error)
            raise
        finally:
            if flushing is not None:
                _fenv.fesetenv(flushing)

    return call


def _compute_with_denormals() -> Any:
    """Leave a floating-point environment that flushes denormal numbers to zero, and return it.

    TensorFlow and XLA set it around what they run, and so around whatever is called from there.
    """
    if _fenv is None or _DENORMAL * _ONE:
        return None
    environment = _Environment()
    _fenv.fegetenv(environment)
    _fenv.fesetenv(_FE_DFL_ENV)
    return environment


def _floating_point_environment() -> Any:
    """Return the C library with fegetenv and fesetenv, where FE_DFL_ENV is known to be -1: glibc and musl.

    It is called with the GIL held: to let it go and take it again would cost more than the call.
    """
    try:
        library = ctypes.PyDLL(ctypes.util.find_library("m")) if sys.platform == "linux" else None
        return library if hasattr(library, "fegetenv") and hasattr(library, "fesetenv") else None
    except OSError:
        return None


_DENORMAL, _ONE = 5e-324, 1.0
_Environment = ctypes.c_char * 128  # bytes; 32 are used on x86-64, 8 on arm64
_FE_DFL_ENV = ctypes.c_void_p(-1)
_fenv = _floating_point_environment()
