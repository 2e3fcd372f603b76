"""The grid's function in every framework and kind, wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tensorflow as tf
import torch

import polybridge
from tests.grid import analytic
from tests.grid.cells import DIFFERENCES, RULE, SOURCES, Side

Fn = Callable[..., Any]

jax.config.update("jax_enable_x64", True)


class Wrapped(NamedTuple):
    """The function as one of the destination, and its sum, since NumPy takes gradients and Hessians of one number."""

    fn: Fn
    total: Fn


@functools.cache
def wrapped(src: Side, dst: str) -> Wrapped:
    """Wrap the function of a source for a destination."""
    functions, options = _MAKERS[src]()
    return Wrapped(
        *(polybridge.wrap(f, src=src.framework, dst=dst, **o) for f, o in zip(functions, options, strict=True))
    )


def _torch() -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x**3 * torch.sin(x) * torch.sum(x)

    return (fn, lambda x: fn(x).sum()), ({}, {})


def _tensorflow(make: Fn) -> Any:
    def fn(x: tf.Tensor) -> tf.Tensor:
        return x**3 * tf.sin(x) * tf.reduce_sum(x)

    return (make(fn), make(lambda x: tf.reduce_sum(fn(x)))), ({}, {})


def _session(fn: Fn) -> Fn:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float64, [None])
        return polybridge.tf1.graph_function(tf.compat.v1.Session(), [x], fn(x))


def _jax() -> Any:
    def fn(x: jax.Array) -> jax.Array:
        return x**3 * jnp.sin(x) * jnp.sum(x)

    return (fn, lambda x: fn(x).sum()), ({}, {})


def _rule() -> Any:
    rule = lambda x: (analytic.value(x), x), lambda x, ct: (ct @ analytic.jacobian(x),)
    total_rule = lambda x: (analytic.value(x).sum(), x), lambda x, ct: (ct * analytic.jacobian(x).sum(0),)
    return _ARRAYS, ({"vjp": rule}, {"vjp": total_rule})


_ARRAYS = analytic.value, lambda x: analytic.value(x).sum()
_TORCH, _EAGER, _FUNCTION, _SESSION, _JAX, _, _ = SOURCES
_MAKERS: dict[Side, Callable[[], Any]] = {
    _TORCH: _torch,
    _EAGER: lambda: _tensorflow(lambda fn: fn),
    _FUNCTION: lambda: _tensorflow(tf.function),
    _SESSION: lambda: _tensorflow(_session),
    _JAX: _jax,
    RULE: _rule,
    DIFFERENCES: lambda: (_ARRAYS, ({"vjp": "finite-difference"}, {"vjp": "finite-difference"})),
}
