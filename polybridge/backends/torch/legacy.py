"""Batches of torch's older vmap: `torch.autograd.grad(..., is_grads_batched=True)` and `torch.autograd.functional`.

Private: torch hands such a batch over as one wrapped tensor, and has no public way to open it (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import is_legacy_batchedtensor

Tensor = torch.Tensor


def is_batch(xs: Sequence[Tensor | None]) -> bool:
    """Whether there is a tensor that stands for a batch."""
    return any([x is not None and is_legacy_batchedtensor(x) for x in xs])


def by_rows(
    fn: Callable[[list[Tensor | None]], Sequence[Tensor | None]], xs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the batch of `fn` of each row; its results are None for all of them or for none."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    opened = {
        i: torch._remove_batch_dim(x, level, 1, 0)
        for i, x in enumerate(xs)
        if x is not None and is_legacy_batchedtensor(x)
    }
    size = next(iter(opened.values())).shape[0]
    rows = [fn([opened[i][row] if i in opened else x for i, x in enumerate(xs)]) for row in range(size)]
    return [
        None if any(x is None for x in column) else torch._add_batch_dim(torch.stack(column), 0, level)
        for column in zip(*rows, strict=True)
    ]
