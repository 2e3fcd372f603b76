"""The smallest DLPack bridge that one would write by hand for each direction and mode: the yardstick.

Unsafe on purpose. One tensor in and one out, of one dtype; no alignment check (TensorFlow aborts the process
on memory that is not 64-byte aligned), no copy (torch may write into TensorFlow's buffers), no ownership, no
structure, no second order. Each runs the user's function once a step. Where the memory cannot be shared by DLPack
(NumPy's, whose arrays torch may adopt), it is adopted or viewed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tensorflow as tf
import torch
from jax.experimental.buffer_callback import buffer_callback

from benchmarks.workloads import Function, Rule


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


def jax_in_torch(fn: Function) -> Function:
    """Return a torch function that runs the JAX function `fn`, compiled with its residuals."""
    forward, backward = _compiled(fn)

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y, ctx.pull = forward(jax.dlpack.from_dlpack(x.detach()))
            return torch.from_dlpack(y)

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
            return torch.from_dlpack(backward(ctx.pull, jax.dlpack.from_dlpack(ct)))

    return Bridge.apply


def jax_in_tf_eager(fn: Function) -> Function:
    """Return an eager TensorFlow function that runs the JAX function `fn`, compiled with its residuals."""
    forward, backward = _compiled(fn)

    def bridge(x: Any) -> Any:
        y, pull = forward(jax.dlpack.from_dlpack(x))
        return _jax_to_tf(y), lambda ct: _jax_to_tf(backward(pull, jax.dlpack.from_dlpack(ct)))

    return tf.custom_gradient(bridge)  # type: ignore[no-any-return]


def jax_in_tf_graph(fn: Function) -> Function:
    """Return a function for TensorFlow graphs that runs the JAX function `fn`, one step at a time."""
    evaluate, pull_back = _compiled(fn)
    pulls: deque[Any] = deque(maxlen=1)

    def forward(x: Any) -> Any:
        y, pull = evaluate(jax.dlpack.from_dlpack(x))
        pulls.append(pull)
        return _jax_to_tf(y)

    def backward(_y: Any, ct: Any) -> Any:
        return _jax_to_tf(pull_back(pulls.pop(), jax.dlpack.from_dlpack(ct)))

    def bridge(x: Any) -> Any:
        y = tf.py_function(forward, [x], x.dtype)
        return y, lambda ct: tf.py_function(backward, [y, ct], ct.dtype)

    return tf.custom_gradient(bridge)  # type: ignore[no-any-return]


def torch_in_jax_eager(fn: Function) -> Function:
    """Return an eager JAX function that runs the torch function `fn`, one step at a time."""
    return _in_jax(lambda x: _torch_vjp(fn, x), jax.dlpack.from_dlpack)


def tf_in_jax_eager(fn: Function) -> Function:
    """Return an eager JAX function that runs the TensorFlow function `fn`, one step at a time."""
    return _in_jax(lambda x: _tf_vjp(fn, x), jax.dlpack.from_dlpack)


def torch_in_jax_jit(fn: Function) -> Function:
    """Return a function for `jax.jit` that runs the torch function `fn` on the memory of XLA, one step at a time."""
    return _in_jax_jit(lambda x: _torch_vjp(fn, x), lambda out, y: torch.from_dlpack(out).copy_(y))


def tf_in_jax_jit(fn: Function) -> Function:
    """Return a function for `jax.jit` that runs the TensorFlow function `fn` on the memory of XLA."""
    return _in_jax_jit(lambda x: _tf_vjp(fn, x), lambda out, y: np.copyto(np.asarray(out), y.numpy()))


def torch_in_numpy(fn: Function) -> Function:
    """Return a function of arrays that runs the torch function `fn`."""

    def vjp(x: np.ndarray) -> Any:
        y, pull = _torch_vjp(fn, x)
        return y.numpy(), lambda ct: (pull(ct).numpy(),)

    return _with_vjp(lambda x: fn(torch.from_numpy(x)).numpy(), vjp)


def tf_in_numpy(fn: Function) -> Function:
    """Return a function of arrays that runs the TensorFlow function `fn`; its memory is not aligned, and copied."""

    def vjp(x: np.ndarray) -> Any:
        y, pull = _tf_vjp(fn, x)
        return y.numpy(), lambda ct: (pull(ct).numpy(),)

    return _with_vjp(lambda x: fn(tf.constant(x)).numpy(), vjp)


def jax_in_numpy(fn: Function) -> Function:
    """Return a function of arrays that runs the JAX function `fn`, compiled with its residuals."""
    alone, (forward, backward) = jax.jit(fn), _compiled(fn)

    def vjp(x: np.ndarray) -> Any:
        y, pull = forward(x)
        return np.asarray(y), lambda ct: (np.asarray(backward(pull, ct)),)

    return _with_vjp(lambda x: np.asarray(alone(x)), vjp)


def numpy_in_torch(rule: Rule) -> Function:
    """Return a torch function that runs a rule of NumPy."""
    fwd, bwd = rule

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y, ctx.residuals = fwd(x.detach().numpy())
            return torch.from_numpy(y)

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(bwd(ctx.residuals, ct.numpy())[0])

    return Bridge.apply


def by_rule(rule: Rule) -> Function:
    """Return a function of arrays that runs a rule of NumPy: what is native there."""
    fwd, bwd = rule

    def vjp(x: np.ndarray) -> Any:
        y, residuals = fwd(x)
        return y, lambda ct: bwd(residuals, ct)

    return _with_vjp(lambda x: fwd(x)[0], vjp)


def _compiled(fn: Function) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Return `x -> (y, pull)` and `(pull, ct) -> gradient`, each compiled: JAX's pullback is a pytree."""
    return jax.jit(lambda x: jax.vjp(fn, x)), jax.jit(lambda pull, ct: pull(ct)[0])


def _torch_vjp(fn: Function, x: Any) -> tuple[torch.Tensor, Callable[[Any], torch.Tensor]]:
    leaf = _adopted(x).requires_grad_()
    y = fn(leaf)
    return y.detach(), lambda ct: torch.autograd.grad(y, leaf, _adopted(ct))[0]


def _adopted(x: Any) -> torch.Tensor:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)


def _tf_vjp(fn: Function, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    primal = _jax_to_tf(x)
    with tf.GradientTape() as tape:
        tape.watch(primal)
        y = fn(primal)
    return y, lambda ct: tape.gradient(y, primal, output_gradients=_jax_to_tf(ct))


def _jax_to_tf(x: Any) -> Any:
    return tf.constant(x) if isinstance(x, np.ndarray) else tf.experimental.dlpack.from_dlpack(x.__dlpack__())


def _in_jax(vjp: Callable[[Any], tuple[Any, Callable[[Any], Any]]], to_jax: Callable[[Any], jax.Array]) -> Function:
    pulls: deque[Callable[[Any], Any]] = deque(maxlen=1)

    def fwd(x: Any) -> tuple[Any, None]:
        y, pull = vjp(x)
        pulls.append(pull)
        return to_jax(y), None

    bridge = jax.custom_vjp(lambda x: fwd(x)[0])
    bridge.defvjp(fwd, lambda _, ct: (to_jax(pulls.pop()(ct)),))
    # `custom_vjp` traces what it calls where nothing is differentiated
    return lambda x: bridge(x) if isinstance(x, jax.core.Tracer) else fwd(x)[0]


def _in_jax_jit(vjp: Callable[[Any], tuple[Any, Callable[[Any], Any]]], write: Callable[[Any, Any], Any]) -> Function:
    pulls: deque[Callable[[Any], Any]] = deque(maxlen=1)

    def forward(_: Any, out: Any, x: Any) -> None:
        y, pull = vjp(x)
        pulls.append(pull)
        write(out, y)

    def backward(_: Any, out: Any, _y: Any, ct: Any) -> None:  # y orders it after the forward
        write(out, pulls.pop()(ct))

    def fwd(x: Any) -> tuple[Any, Any]:
        y = buffer_callback(forward, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return y, y

    def bwd(y: Any, ct: Any) -> tuple[Any]:
        return (buffer_callback(backward, jax.ShapeDtypeStruct(ct.shape, ct.dtype))(y, ct),)

    bridge = jax.custom_vjp(lambda x: fwd(x)[0])
    bridge.defvjp(fwd, bwd)
    return bridge


def _with_vjp(fn: Function, vjp: Callable[[np.ndarray], Any]) -> Function:
    """Return a function of arrays that has its derivative as a method, as those of polybridge have."""

    def call(x: np.ndarray) -> Any:
        return fn(x)

    call.vjp = vjp  # type: ignore[attr-defined]
    return call


def _to_tf(tensor: torch.Tensor) -> Any:
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def _to_torch(tensor: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
