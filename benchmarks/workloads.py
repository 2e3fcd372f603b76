"""The functions that are timed, each written once in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

Function = Callable[[Any], Any]
Rule = tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], tuple[Any]]]
"""`(fwd, bwd)`, as `polybridge.wrap(vjp=...)` takes them."""


@dataclass(frozen=True)
class Workload:
    """One function of one float32 tensor, whose output has the shape of its input.

    Args:
        name: what the command line and the table call it.
        functions: the same function by framework.
        rule: its derivative for NumPy, which has none of its own.
        rank: how many (equal) dimensions the input has.
    """

    name: str
    functions: dict[str, Function]
    rule: Rule
    rank: int

    def shape(self, size: int) -> tuple[int, ...]:
        """Return the input's shape for `size` elements, rounded to equal dimensions."""
        side = round(math.pow(size, 1 / self.rank))
        return (side,) * self.rank


def tf_elementwise(x: Any) -> Any:
    return tf.sin(x) * x


def torch_elementwise(x: Any) -> Any:
    return torch.sin(x) * x


def jax_elementwise(x: Any) -> Any:
    return jnp.sin(x) * x


def numpy_elementwise(x: Any) -> Any:
    return np.sin(x) * x


def elementwise_fwd(x: Any) -> tuple[Any, Any]:
    sine = np.sin(x)
    return sine * x, (x, sine)


def elementwise_bwd(residuals: Any, ct: Any) -> tuple[Any]:
    x, sine = residuals
    return (ct * (np.cos(x) * x + sine),)


def tf_matmul(x: Any) -> Any:
    return tf.linalg.matmul(x, x)


def torch_matmul(x: Any) -> Any:
    return torch.matmul(x, x)


def numpy_matmul(x: Any) -> Any:  # and JAX's
    return x @ x


def matmul_fwd(x: Any) -> tuple[Any, Any]:
    return x @ x, x


def matmul_bwd(x: Any, ct: Any) -> tuple[Any]:
    return (ct @ x.T + x.T @ ct,)


# Memory bound: three passes over the data, so that a copy (one more) is visible and arithmetic hides nothing.
ELEMENTWISE = Workload(
    "elementwise",
    {"tf": tf_elementwise, "torch": torch_elementwise, "jax": jax_elementwise, "numpy": numpy_elementwise},
    (elementwise_fwd, elementwise_bwd),
    rank=1,
)

# Arithmetic bound, as a layer is. 1.6e7 elements are 128 GFLOP a product, so it is not in the default run.
MATMUL = Workload(
    "matmul",
    {"tf": tf_matmul, "torch": torch_matmul, "jax": numpy_matmul, "numpy": numpy_matmul},
    (matmul_fwd, matmul_bwd),
    rank=2,
)

WORKLOADS = {workload.name: workload for workload in (ELEMENTWISE, MATMUL)}
