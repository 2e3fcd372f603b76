"""Checkpoints inside of a torch module that computes with other weights than its own: they run again with these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.checkpoint

from polybridge.core.threads import PerThread

_again: PerThread[Callable[..., Any] | None] = PerThread(None)


def noticing(again: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let what a checkpoint computes once more be computed by `again`, which is given a function and its arguments."""
    return _again.set(again)


class _Frame(torch.utils.checkpoint._CheckpointFrame):
    """What `torch.utils.checkpoint` keeps of a forward that it runs again in the backward, with the weights of now.

    Of a module that is called with other weights these are the wrong ones. Private (torch 2.13): there is no hook.
    """

    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        again = _again.value
        super().__init__(recompute_fn if again is None else partial(again, recompute_fn), *args, **kwargs)


torch.utils.checkpoint._CheckpointFrame = _Frame  # type: ignore[misc]
