"""The functions that are timed, each written once in TensorFlow and once in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import torch

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Workload:
    """One function of one float32 tensor, whose output has the shape of its input.

    Args:
        name: what the command line and the table call it.
        functions: the same function by framework, "tf" and "torch".
        rank: how many (equal) dimensions the input has.
    """

    name: str
    functions: dict[str, Function]
    rank: int

    def shape(self, size: int) -> tuple[int, ...]:
        """Return the input's shape for about `size` elements (exactly, where `size` is a power of the rank)."""
        side = round(math.pow(size, 1 / self.rank))
        return (side,) * self.rank


# Memory bound: three passes over the data, so that a copy (one more) is visible and arithmetic hides nothing.
ELEMENTWISE = Workload(
    "elementwise",
    {"tf": lambda x: tf.sin(x) * x, "torch": lambda x: torch.sin(x) * x},
    rank=1,
)

# Arithmetic bound: what a layer looks like. 1.6e7 elements are 128 GFLOP a product, so it is not in the default run.
MATMUL = Workload(
    "matmul",
    {"tf": lambda x: tf.linalg.matmul(x, x), "torch": lambda x: torch.matmul(x, x)},
    rank=2,
)

WORKLOADS = {workload.name: workload for workload in (ELEMENTWISE, MATMUL)}
