"""Brings the callbacks of graphs to rest before Python ends.

TensorFlow's own threads, such as those that fill the buffers of a `tf.data` pipeline, go on while Python is taken down.
One that asks for Python then is ended in the midst of C++: the process aborts, or waits for the thread and hangs.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time

_QUIET = 0.02  # seconds without a call, after which no more are expected: buffers are full, and nobody reads them
_PATIENCE = 10.0  # seconds; a callback may be waiting for what will never come
_running: set[int] = set()  # threads
_refused: list[str] = []
_is_ending = False


def enter(call: str) -> None:
    """Note that this thread is in a callback.

    Raises:
        StopIteration: Python ends, which waits for callbacks that run and takes no more.
    """
    _running.add(threading.get_ident())
    if _is_ending:
        _refused.append(call)
        leave()
        # The one exception that TensorFlow does not log. Whoever waits for a result gets an OutOfRangeError.
        raise StopIteration(f"{call}: Python is ending, and graphs cannot call its functions any more")


def leave() -> None:
    """Note that this thread is in none."""
    _running.discard(threading.get_ident())


@functools.cache
def watch() -> None:
    """Wait for callbacks when Python ends; a forked child has none of its parent's threads."""
    atexit.register(_rest)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_running.clear)


def _rest() -> None:
    global _is_ending
    _is_ending = True
    deadline, refused = time.monotonic() + _PATIENCE, -1
    while time.monotonic() < deadline and (_running or refused != len(_refused)):
        refused = len(_refused)
        time.sleep(_QUIET)
