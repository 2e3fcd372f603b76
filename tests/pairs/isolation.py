"""Runs a piece of a test in a process of its own, because some frameworks abort the process that they are in.

The children are forked from a server that has imported the frameworks and run nothing, so each starts in no time.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tensorflow", "jax", "polybridge"])


class Ended(NamedTuple):
    """How a child ended: it returned `value`, raised with traceback `value`, was killed by signal `value`, or hung."""

    how: Literal["returned", "raised", "killed", "hung"]
    value: Any

    def result(self) -> Any:
        """Return what the function returned; fail if it did not return."""
        assert self.how == "returned", f"{self.how}: {self.value}"
        return self.value


def isolated(fn: Callable[..., Any], *args: Any, timeout: float = 120) -> Ended:
    """Call `fn(*args)`, which can be pickled, in a new process."""
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_report, args=(sender, fn, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            process.kill()
            return Ended("hung", None)
        return receiver.recv()
    except EOFError:
        process.join()
        return Ended("killed", -(process.exitcode or 0))
    finally:
        process.join(timeout=10)
        receiver.close()


def _report(sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faulthandler.disable()
    try:
        ended = Ended("returned", fn(*args))
    except Exception:
        ended = Ended("raised", traceback.format_exc())
    sender.send(ended)
