"""Refuses to run where frameworks cannot: their thread pools survive no fork, and nothing of them the end of Python.

In a forked child a framework that had started in the parent hangs. When Python takes itself down, in the `__del__` of
objects that are left then, JAX hangs, and torch aborts the process.
"""

from __future__ import annotations

import atexit
import os
import sys

from polybridge.core.errors import EndingError, ForkError
from polybridge.core.registry import registry

_started_before_fork: tuple[str, ...] = ()
is_safe = True  # all that a call reads; None at the very end, as the globals of every module


def check(call: str) -> None:
    """Raise an error if frameworks cannot be called here.

    Raises:
        ForkError: this process is a forked child of one in which a framework had started.
        EndingError: Python is being taken down.
    """
    if is_safe:
        return
    if sys.is_finalizing():
        raise EndingError.of(call)
    if _started_before_fork:
        raise ForkError.in_child(call, _started_before_fork)


def _note_fork() -> None:
    global _started_before_fork, is_safe
    _started_before_fork = tuple(name for name, backend in registry.loaded.items() if backend.started())
    is_safe = is_safe and not _started_before_fork


@atexit.register
def _note_end() -> None:
    """Have every call looked at from now on: what other handlers of `atexit` call still works."""
    global is_safe
    is_safe = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
