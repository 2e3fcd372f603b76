"""Refuses to run in a forked child what had started in its parent: frameworks' thread pools do not survive a fork."""

from __future__ import annotations

import os

from polybridge.core.errors import ForkError
from polybridge.core.registry import registry

_started_before_fork: tuple[str, ...] = ()


def check(call: str) -> None:
    """Raise `ForkError` if this process is a forked child of one in which a framework had started."""
    if _started_before_fork:
        raise ForkError.in_child(call, _started_before_fork)


def _note_fork() -> None:
    global _started_before_fork
    _started_before_fork = tuple(name for name, backend in registry.loaded.items() if backend.started())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
