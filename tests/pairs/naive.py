"""The bridge that everybody writes first: DLPack and a gradient, nothing else. It shows that the traps are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

Fn = Callable[..., Any]


def wrap(fn: Fn, src: str, dst: str) -> Fn:
    """Return `fn` as a function of `dst` by plain DLPack; eager, tensors and flat tuples only."""
    return _in_torch(fn) if dst == "torch" else _in_tensorflow(fn)


def _to_tf(x: torch.Tensor) -> tf.Tensor:
    return tf.experimental.dlpack.from_dlpack(to_dlpack(x.detach()))


def _to_torch(x: tf.Tensor) -> torch.Tensor:
    return from_dlpack(tf.experimental.dlpack.to_dlpack(x))


def _in_torch(fn: Fn) -> Fn:
    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: torch.Tensor) -> Any:
            with tf.GradientTape() as ctx.tape:
                ctx.xs = [_to_tf(x) for x in xs]
                ctx.tape.watch(ctx.xs)
                found = fn(*ctx.xs)
            ctx.ys = _listed(found)
            return tuple(map(_to_torch, ctx.ys)) if isinstance(found, tuple) else _to_torch(found)

        @staticmethod
        def backward(ctx: Any, *cts: torch.Tensor) -> Any:
            found = ctx.tape.gradient(ctx.ys, ctx.xs, output_gradients=[_to_tf(ct) for ct in cts])
            return tuple(None if g is None else _to_torch(g) for g in found)

    return Call.apply


def _in_tensorflow(fn: Fn) -> Fn:
    @tf.custom_gradient
    def call(*xs: tf.Tensor) -> Any:
        inputs = [_to_torch(tf.convert_to_tensor(x)) for x in xs]
        with torch.no_grad():
            found = fn(*inputs)

        def gradient(*cts: tf.Tensor) -> list[Any]:
            primals = [x.requires_grad_() for x in inputs]
            with torch.enable_grad():
                ys = _listed(fn(*(x.view_as(x) for x in primals)))
            grads = torch.autograd.grad(ys, primals, [_to_torch(ct) for ct in cts], allow_unused=True)
            return [None if g is None else _to_tf(g) for g in grads]

        results = [_to_tf(y) for y in _listed(found)]
        return (results if isinstance(found, tuple) else results[0]), gradient

    return call


def _listed(found: Any) -> Sequence[Any]:
    return list(found) if isinstance(found, tuple) else [found]
