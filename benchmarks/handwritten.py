"""The smallest DLPack bridge that one would write by hand for each direction and mode: the yardstick.

Unsafe on purpose. One tensor in and one out, of one dtype; no alignment check (TensorFlow aborts the process
on memory that is not 64-byte aligned), no copy (torch may write into TensorFlow's buffers), no ownership, no
structure, no second order. Each runs the user's function once a step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import tensorflow as tf
import torch

from benchmarks.workloads import Function


def tf_in_torch(fn: Function) -> Function:
    """Return a torch function that runs the TensorFlow function `fn` under a tape."""

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = _to_tf(x)
            with tf.GradientTape() as ctx.tape:
                ctx.tape.watch(ctx.x)
                ctx.y = fn(ctx.x)
            return _to_torch(ctx.y)

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
            return _to_torch(ctx.tape.gradient(ctx.y, ctx.x, output_gradients=_to_tf(ct)))

    return Bridge.apply


def torch_in_tf_eager(fn: Function) -> Function:
    """Return an eager TensorFlow function that runs the torch function `fn`."""

    def bridge(x: Any) -> Any:
        leaf = _to_torch(x).requires_grad_()
        y = fn(leaf)

        def pullback(ct: Any) -> Any:
            return _to_tf(torch.autograd.grad(y, leaf, _to_torch(ct))[0])

        return _to_tf(y.detach()), pullback

    return tf.custom_gradient(bridge)  # type: ignore[no-any-return]


def torch_in_tf_graph(fn: Function) -> Function:
    """Return a function for TensorFlow graphs (`tf.function`, TF1) that runs `fn`, one step at a time."""
    # the latest forward; a step without a backward leaves its own to the next one
    forwards: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=1)

    def forward(x: Any) -> Any:
        leaf = _to_torch(x).requires_grad_()
        y = fn(leaf)
        forwards.append((leaf, y))
        return _to_tf(y.detach())

    def backward(_y: Any, ct: Any) -> Any:  # y orders it after the forward: a TF1 graph does not by itself
        leaf, y = forwards.pop()
        return _to_tf(torch.autograd.grad(y, leaf, _to_torch(ct))[0])

    def bridge(x: Any) -> Any:
        y = tf.py_function(forward, [x], x.dtype)
        return y, lambda ct: tf.py_function(backward, [y, ct], ct.dtype)

    return tf.custom_gradient(bridge)  # type: ignore[no-any-return]


def _to_tf(tensor: torch.Tensor) -> Any:
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def _to_torch(tensor: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
