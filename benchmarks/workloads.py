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
        """Return the input's shape for `size` elements, rounded to equal dimensions."""
        side = round(math.pow(size, 1 / self.rank))
        return (side,) * self.rank


def tf_elementwise(x: Any) -> Any:
    return tf.sin(x) * x


def torch_elementwise(x: Any) -> Any:
    return torch.sin(x) * x


def tf_matmul(x: Any) -> Any:
    return tf.linalg.matmul(x, x)


def torch_matmul(x: Any) -> Any:
    return torch.matmul(x, x)


# Memory bound: three passes over the data, so that a copy (one more) is visible and arithmetic hides nothing.
ELEMENTWISE = Workload(
    "elementwise",
    {"tf": tf_elementwise, "torch": torch_elementwise},
    rank=1,
)

# Arithmetic bound, as a layer is. 1.6e7 elements are 128 GFLOP a product, so it is not in the default run.
MATMUL = Workload(
    "matmul",
    {"tf": tf_matmul, "torch": torch_matmul},
    rank=2,
)

WORKLOADS = {workload.name: workload for workload in (ELEMENTWISE, MATMUL)}
