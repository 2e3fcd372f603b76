"""Checkpoints inside of a torch module that computes with other weights than its own: they run again with these."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils.checkpoint

_calls = threading.local()


@contextlib.contextmanager
def noticing(again: Callable[..., Any]) -> Iterator[None]:
    """Let what a checkpoint computes once more be computed by `again`, which is given a function and its arguments."""
    before = getattr(_calls, "again", None)
    _calls.again = again
    try:
        yield
    finally:
        _calls.again = before


class _Frame(torch.utils.checkpoint._CheckpointFrame):
    """What `torch.utils.checkpoint` keeps of a forward that it runs again in the backward, with the weights of now.

    Of a module that is called with other weights these are the wrong ones. Private (torch 2.13): there is no hook.
    """

    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        again = getattr(_calls, "again", None)
        super().__init__(recompute_fn if again is None else partial(again, recompute_fn), *args, **kwargs)


torch.utils.checkpoint._CheckpointFrame = _Frame  # type: ignore[misc]
