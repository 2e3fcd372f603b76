"""Rules for derivatives, written in each framework, and the framework's own custom function of the same derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tensorflow as tf
import torch

Fn = Callable[..., Any]


class Ruled(NamedTuple):
    """A function, its rule, and the same natively."""

    fn: Fn
    vjp: tuple[Fn, Fn]
    native: Fn


class TorchClipped(torch.autograd.Function):
    """The identity, with its cotangent between -1 and 1."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, ct):
        return ct.clamp(-1, 1)


class TorchStraightThrough(torch.autograd.Function):
    """Rounding that differentiates as the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, ct):
        return ct


class TorchScaled(torch.autograd.Function):
    """A square with a third of its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ct * 2 * x / 3


@tf.custom_gradient
def tf_clipped(x):
    return x * 1, lambda ct: tf.clip_by_value(ct, -1, 1)


@tf.custom_gradient
def tf_straight_through(x):
    return tf.round(x), lambda ct: ct


@tf.custom_gradient
def tf_scaled(x):
    return x * x, lambda ct: ct * 2 * x / 3


def _jax(fn, fwd, bwd):
    native = jax.custom_vjp(fn)
    native.defvjp(fwd, bwd)
    return Ruled(fn, (fwd, bwd), native)


RULES: dict[str, dict[str, Ruled]] = {
    "torch": {
        "clipped": Ruled(
            lambda x: x * 1, (lambda x: (x * 1, None), lambda _, ct: (ct.clamp(-1, 1),)), TorchClipped.apply
        ),
        "straight_through": Ruled(
            torch.round, (lambda x: (torch.round(x), None), lambda _, ct: (ct,)), TorchStraightThrough.apply
        ),
        "scaled": Ruled(
            torch.square, (lambda x: (x * x, x), lambda x, ct: (ct * 2 * x / 3,)), TorchScaled.apply
        ),
    },
    "tensorflow": {
        "clipped": Ruled(
            lambda x: x * 1, (lambda x: (x * 1, None), lambda _, ct: (tf.clip_by_value(ct, -1, 1),)), tf_clipped
        ),
        "straight_through": Ruled(
            tf.round, (lambda x: (tf.round(x), None), lambda _, ct: (ct,)), tf_straight_through
        ),
        "scaled": Ruled(
            tf.square, (lambda x: (x * x, x), lambda x, ct: (ct * 2 * x / 3,)), tf_scaled
        ),
    },
    "jax": {
        "clipped": _jax(lambda x: x * 1, lambda x: (x * 1, None), lambda _, ct: (jnp.clip(ct, -1, 1),)),
        "straight_through": _jax(jnp.round, lambda x: (jnp.round(x), None), lambda _, ct: (ct,)),
        "scaled": _jax(jnp.square, lambda x: (x * x, x), lambda x, ct: (ct * 2 * x / 3,)),
    },
}  # fmt: skip
