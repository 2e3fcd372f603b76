"""Raises KeyboardInterrupt in the midst of polybridge's own code, as a signal does that comes there."""

import linecache
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any


def interrupted(fn: Callable[[], object], at: int, functions: Collection[CodeType]) -> bool:
    """Call `fn` and raise KeyboardInterrupt before a line of some functions.

    Not where a `with` ends: Python looks for signals after calls, none of which comes between a body and `__exit__`.

    Args:
        fn: what is called, on this thread.
        at: the number of the line, of those that run.
        functions: whose lines count.

    Returns:
        Whether there was such a line; the interrupt has reached the caller then.
    """
    seen = 0
    entered: set[tuple[FrameType, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code not in functions:
            return None
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            if (frame, frame.f_lineno) in entered:
                return trace
            entered.add((frame, frame.f_lineno))
        if event == "line":
            seen += 1
            if seen == at + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
