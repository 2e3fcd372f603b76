"""Values that belong to one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class PerThread(threading.local, Generic[Value]):
    """A value that each thread sets for itself, for as long as a call runs.

    Args:
        value: on a thread that has set no other.
    """

    def __init__(self, value: Value) -> None:
        """Start with the same value on each thread, as `threading.local` calls it there again."""
        self.value = value

    @contextlib.contextmanager
    def set(self, value: Value) -> Iterator[None]:
        """Set it while the context is open."""
        before = self.value
        self.value = value
        try:
            yield
        finally:
            self.value = before
