"""The ways in which a destination calls a function, each as a step that takes no arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

from benchmarks import handwritten, peers
from benchmarks.peers import Peer
from benchmarks.workloads import Function

Step = Callable[[], Any]
Drive = Callable[[Function, np.ndarray, np.ndarray, bool], Step]


@dataclass(frozen=True)
class Mode:
    """A direction, and how the destination runs.

    Args:
        name: what the command line and the table call it.
        src: the framework of the user's function.
        dst: the framework that calls it.
        drive: `(function of dst, input, cotangent, backward?) -> step`; a step runs the forward, or the
            forward and the backward, once.
        handwritten: `(function of src) -> function of dst`, the yardstick; of NumPy's it takes the rule.
        peers: other bridges.
    """

    name: str
    src: str
    dst: str
    drive: Drive
    handwritten: Callable[[Any], Function]
    peers: tuple[Peer, ...] = ()


def drive_torch_eager(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step of eager torch: `fn` at a leaf, then `torch.autograd.grad` with a dense cotangent."""
    # clone: torch's own allocator aligns to 64 bytes, which the unchecked hand-written bridge depends on
    leaf = torch.from_numpy(x).clone().requires_grad_(backward)
    cotangent = torch.from_numpy(ct).clone()

    def forward() -> Any:
        return fn(leaf)

    def forward_backward() -> Any:
        y = fn(leaf)
        return y, torch.autograd.grad(y, leaf, cotangent)

    return forward_backward if backward else forward


def drive_tf_eager(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step of eager TensorFlow: `fn`, under a tape where the backward follows."""
    primal, cotangent = tf.constant(x), tf.constant(ct)
    return lambda: _tf_step(fn, primal, cotangent, backward)


def drive_tf_function(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step that is one `tf.function`, tape included."""
    primal, cotangent = tf.constant(x), tf.constant(ct)
    step = tf.function(lambda primal, cotangent: _tf_step(fn, primal, cotangent, backward))
    return lambda: step(primal, cotangent)


def drive_tf1_graph(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step that is one run of a TF1 `Session`. Data stay in variables: feeds and fetches copy."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variables = [
            v1.get_variable(name, value.shape, tf.float32, use_resource=True) for name, value in (("x", x), ("ct", ct))
        ]
        primal, cotangent = (variable.read_value() for variable in variables)
        y = fn(primal)
        targets = [y, *v1.gradients(y, primal, grad_ys=cotangent)] if backward else [y]
        session = v1.Session()
        for variable, value in zip(variables, (x, ct), strict=True):
            session.run(variable.initializer, {variable.initializer.inputs[1]: value})
        return session.make_callable([target.op for target in targets])  # type: ignore[no-any-return]


def drive_jax_eager(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step of JAX outside of any compiled code."""
    primal, cotangent = jnp.asarray(x), jnp.asarray(ct)
    return lambda: jax.block_until_ready(_jax_step(fn, primal, cotangent, backward))


def drive_jax_jit(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step that is one compiled function, `jax.vjp` included."""
    primal, cotangent = jnp.asarray(x), jnp.asarray(ct)
    step = jax.jit(lambda primal, cotangent: _jax_step(fn, primal, cotangent, backward))
    return lambda: jax.block_until_ready(step(primal, cotangent))


def drive_numpy(fn: Function, x: np.ndarray, ct: np.ndarray, backward: bool) -> Step:
    """Return a step of NumPy: `fn`, by its method `vjp` where the backward follows."""

    def forward_backward() -> Any:
        y, pull = fn.vjp(x)  # type: ignore[attr-defined]
        return y, pull(ct)

    return forward_backward if backward else lambda: fn(x)


MODES = {
    mode.name: mode
    for mode in (
        Mode("torch-eager", "tf", "torch", drive_torch_eager, handwritten.tf_in_torch),
        Mode("tf-eager", "torch", "tf", drive_tf_eager, handwritten.torch_in_tf_eager),
        Mode("tf-function", "torch", "tf", drive_tf_function, handwritten.torch_in_tf_graph),
        Mode("tf1-graph", "torch", "tf", drive_tf1_graph, handwritten.torch_in_tf_graph),
        Mode("torch-eager-from-jax", "jax", "torch", drive_torch_eager, handwritten.jax_in_torch, (peers.FRESH_VJP,)),
        Mode("tf-eager-from-jax", "jax", "tf", drive_tf_eager, handwritten.jax_in_tf_eager),
        Mode("tf-function-from-jax", "jax", "tf", drive_tf_function, handwritten.jax_in_tf_graph),
        Mode(
            "jax-eager",
            "torch",
            "jax",
            drive_jax_eager,
            handwritten.torch_in_jax_eager,
            (peers.TORCH2JAX, peers.TORCH_PURE_CALLBACK),
        ),
        Mode(
            "jax-jit",
            "torch",
            "jax",
            drive_jax_jit,
            handwritten.torch_in_jax_jit,
            (peers.TORCH2JAX, peers.TORCH_PURE_CALLBACK),
        ),
        Mode("jax-eager-from-tf", "tf", "jax", drive_jax_eager, handwritten.tf_in_jax_eager, (peers.TF_PURE_CALLBACK,)),
        Mode("jax-jit-from-tf", "tf", "jax", drive_jax_jit, handwritten.tf_in_jax_jit, (peers.TF_PURE_CALLBACK,)),
        Mode("numpy", "torch", "numpy", drive_numpy, handwritten.torch_in_numpy),
        Mode("numpy-from-tf", "tf", "numpy", drive_numpy, handwritten.tf_in_numpy),
        Mode("numpy-from-jax", "jax", "numpy", drive_numpy, handwritten.jax_in_numpy),
        Mode("torch-eager-from-numpy", "numpy", "torch", drive_torch_eager, handwritten.numpy_in_torch),
    )
}

NATIVE_DRIVES: dict[str, Drive] = {
    "torch": drive_torch_eager,
    "tf": drive_tf_eager,
    "jax": drive_jax_jit,
    "numpy": drive_numpy,
}


def _jax_step(fn: Function, primal: Any, cotangent: Any, backward: bool) -> Any:
    if not backward:
        return fn(primal)
    y, pull = jax.vjp(fn, primal)
    return y, pull(cotangent)


def _tf_step(fn: Function, primal: Any, cotangent: Any, backward: bool) -> Any:
    if not backward:
        return fn(primal)
    with tf.GradientTape() as tape:
        tape.watch(primal)
        y = fn(primal)
    return y, tape.gradient(y, primal, output_gradients=cotangent)
