"""The functions that are timed, each written once in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
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
        functions: the same function by framework, of those that it is timed in.
        rule: its derivative for NumPy, which has none of its own.
        rank: how many (equal) dimensions the input has.
    """

    name: str
    functions: dict[str, Function]
    rule: Rule | None = None
    rank: int = 1

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
)

# Arithmetic bound, as a layer is. 1.6e7 elements are 128 GFLOP a product, so it is not in the default run.
MATMUL = Workload(
    "matmul",
    {"tf": tf_matmul, "torch": torch_matmul, "jax": numpy_matmul, "numpy": numpy_matmul},
    (matmul_fwd, matmul_bwd),
    rank=2,
)


def normalised(x: Any) -> Any:
    return (x - x.mean()) / jnp.sqrt(x.var() + 1e-5)


def stepped(x: Any) -> Any:
    """Return the state of pendulums, angles before velocities, after a step of the classical Runge-Kutta method."""

    def rate(state: Any) -> Any:
        angle, velocity = jnp.split(state, 2)
        return jnp.concatenate([velocity, -jnp.sin(angle) - 0.1 * velocity])

    k1 = rate(x)
    k2 = rate(x + 0.05 * k1)
    k3 = rate(x + 0.05 * k2)
    return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + rate(x + 0.1 * k3))


# Small functions of JAX, of two operations to some forty: without a bridge that compiles, each call traces them anew.
SMALL = (
    Workload("log_softmax", {"jax": jax.nn.log_softmax}),
    Workload("gelu", {"jax": jax.nn.gelu}),
    Workload("layer_norm", {"jax": normalised}),
    Workload("runge_kutta", {"jax": stepped}),
)

WORKLOADS = {workload.name: workload for workload in (ELEMENTWISE, MATMUL, *SMALL)}
