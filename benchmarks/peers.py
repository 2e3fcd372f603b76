"""What users have had so far: other bridges to compare with, and how much of their time polybridge may take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorflow as tf
import torch

from benchmarks.workloads import Function


@dataclass(frozen=True)
class Peer:
    """Another bridge.

    Args:
        name: what the table calls it.
        bridge: `(function of src, input) -> function of dst`.
        limit: how much of its time polybridge may take in small calls.
        module: what has to be installed.
    """

    name: str
    bridge: Callable[[Function, np.ndarray], Function]
    limit: float
    module: str = "jax"

    @property
    def installed(self) -> bool:
        """Return whether it can be measured here."""
        return importlib.util.find_spec(self.module) is not None


def fresh_vjp(fn: Function, _: np.ndarray) -> Function:
    """Return a torch function that runs the JAX function `fn` under a `jax.vjp` of its own at every call."""

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y, ctx.pull = jax.vjp(fn, jax.dlpack.from_dlpack(x.detach()))
            return torch.from_dlpack(y)

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
            return torch.from_dlpack(ctx.pull(jax.dlpack.from_dlpack(ct))[0])

    return Bridge.apply


def torch_by_pure_callback(fn: Function, _: np.ndarray) -> Function:
    """Return a JAX function that runs the torch function `fn` by `jax.pure_callback`, again in the backward."""

    def backward(x: Any, ct: Any) -> Any:
        leaf = torch.tensor(np.asarray(x), requires_grad=True)
        return torch.autograd.grad(fn(leaf), leaf, torch.tensor(np.asarray(ct)))[0].numpy()

    return _by_pure_callback(lambda x: fn(torch.tensor(np.asarray(x))).numpy(), backward)


def tf_by_pure_callback(fn: Function, _: np.ndarray) -> Function:
    """Return a JAX function that runs the TensorFlow function `fn` by `jax.pure_callback`, again in the backward."""

    def backward(x: Any, ct: Any) -> Any:
        primal = tf.constant(np.asarray(x))
        with tf.GradientTape() as tape:
            tape.watch(primal)
            y = fn(primal)
        return tape.gradient(y, primal, output_gradients=tf.constant(np.asarray(ct))).numpy()

    return _by_pure_callback(lambda x: fn(tf.constant(np.asarray(x))).numpy(), backward)


def torch2jax(fn: Function, x: np.ndarray) -> Function:
    """Return a JAX function by `wrap-torch2jax`, which builds C++ at its first import."""
    from wrap_torch2jax import torch2jax

    tensor = torch.from_numpy(x)
    return torch2jax(fn, tensor, output_shapes=tensor, depth=1)  # type: ignore[no-any-return]


def _by_pure_callback(forward: Function, backward: Callable[[Any, Any], Any]) -> Function:
    """Return a JAX function with a `custom_vjp` of two callbacks, as JAX's documentation has it."""

    def call(x: Any) -> Any:
        return jax.pure_callback(forward, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def pull(x: Any, ct: Any) -> tuple[Any]:
        return (jax.pure_callback(backward, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ct),)

    bridge = jax.custom_vjp(call)
    bridge.defvjp(lambda x: (call(x), x), pull)
    return bridge


FRESH_VJP = Peer("jax.vjp per call", fresh_vjp, 1 / 15)
TORCH_PURE_CALLBACK = Peer("pure_callback", torch_by_pure_callback, 0.4)
TF_PURE_CALLBACK = Peer("pure_callback", tf_by_pure_callback, 0.4)
TORCH2JAX = Peer("torch2jax", torch2jax, 1.0, module="wrap_torch2jax")
