"""Each framework's own comparison of the first and second derivatives of a function with finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
from jax.test_util import check_grads

from tests.functions.points import Array

Fn = Callable[..., Any]

jax.config.update("jax_enable_x64", True)


def in_torch(wrapped: Fn, points: Sequence[Array]) -> None:
    """Check by `gradcheck` and `gradgradcheck`."""

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.utils._pytree.tree_leaves(wrapped(*xs))
        return tuple(y for y in found if y.is_floating_point() or y.is_complex())

    xs = [torch.tensor(x, requires_grad=True) for x in points]
    assert torch.autograd.gradcheck(fn, xs)
    assert torch.autograd.gradgradcheck(fn, xs, fast_mode=True)


def in_tensorflow(wrapped: Fn, points: Sequence[Array], order: int = 2) -> None:
    """Check the function and, at order 2, its gradient by `tf.test.compute_gradient`."""

    def fn(*xs: Any) -> Any:
        return _joined(wrapped(*xs))

    def gradient(*xs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = tf.sin(fn(*xs))
        return _joined(tape.gradient(y, xs, unconnected_gradients="zero"))

    for checked in (fn, gradient)[:order]:
        theoretical, numerical = tf.test.compute_gradient(checked, [tf.constant(x) for x in points], delta=1e-4)
        for found, expected in zip(theoretical, numerical, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _joined(tree: Any) -> Any:
    """Return the differentiable tensors of a result as one real vector, which TensorFlow's checker takes."""
    found = [y for y in tf.nest.flatten(tree) if y.dtype.is_floating or y.dtype.is_complex]
    parts = [part for y in found for part in ([tf.math.real(y), tf.math.imag(y)] if y.dtype.is_complex else [y])]
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def in_jax(wrapped: Fn, points: Sequence[Array]) -> None:
    """Check by `check_grads` in both modes."""

    def fn(*xs: jax.Array) -> list[jax.Array]:
        return [y for y in jax.tree.leaves(wrapped(*xs)) if jnp.issubdtype(y.dtype, jnp.inexact)]

    check_grads(fn, tuple(map(jnp.array, points)), order=2, modes=["fwd", "rev"], rtol=1e-4, atol=1e-4)


CHECKERS: dict[str, Callable[..., None]] = {
    "torch": in_torch,
    "tensorflow": in_tensorflow,
    "jax": in_jax,
}
