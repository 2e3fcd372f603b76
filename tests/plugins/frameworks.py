"""Three frameworks in one vocabulary, so that a test says once what it asks of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
import toy

Tensor = Any
jax.config.update("jax_enable_x64", True)


class Toy:
    name = "toy"

    def tensor(self, values: Any, dtype: str = "float64") -> Tensor:
        return toy.array(np.asarray(values, dtype))

    def numpy(self, x: Tensor) -> np.ndarray:
        return x.value

    def sin(self, x: Tensor) -> Tensor:
        return toy.sin(x)

    def sum(self, x: Tensor) -> Tensor:
        return x.sum()

    def pull(self, fn: Callable[..., Sequence[Tensor]], xs: Sequence[Tensor], cts: Sequence[Tensor | None]):
        """Return the cotangents of `xs` by those of the outputs of `fn`."""
        return toy.vjp(fn, xs)[1](cts)

    def derivative(self, fn: Callable[[Tensor], Tensor], order: int = 1) -> Callable[[Tensor], Tensor]:
        """Return a derivative of an elementwise function."""
        for _ in range(order):
            fn = toy.grad(lambda x, fn=fn: fn(x).sum())
        return fn


class Torch:
    name = "torch"

    def tensor(self, values, dtype="float64"):
        return torch.tensor(np.asarray(values).tolist(), dtype=getattr(torch, dtype)).reshape(np.shape(values))

    def numpy(self, x):
        return x.detach().numpy()

    def sin(self, x):
        return torch.sin(x)

    def sum(self, x):
        return x.sum()

    def pull(self, fn, xs, cts):
        leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in xs]
        pairs = [(y, ct) for y, ct in zip(fn(*leaves), cts, strict=True) if ct is not None and y.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [ct for _, ct in pairs], allow_unused=True))
        return [next(found) if x.requires_grad else None for x in leaves]

    def derivative(self, fn, order=1):
        def derived(x):
            x = x.detach().requires_grad_()
            y = fn(x)
            for n in range(order):
                (y,) = torch.autograd.grad(y.sum(), x, create_graph=n < order - 1)
            return y

        return derived


class TensorFlow:
    name = "tensorflow"

    def run(self, fn):
        """Return `fn` as this variant runs it."""
        return fn

    def tensor(self, values, dtype="float64"):
        return tf.constant(np.asarray(values).tolist(), dtype, shape=np.shape(values))

    def numpy(self, x):
        return x.numpy()

    def sin(self, x):
        return tf.sin(x)

    def sum(self, x):
        return tf.reduce_sum(x)

    def pull(self, fn, xs, cts):
        def pulled(*xs):
            with tf.GradientTape() as tape:
                tape.watch([x for x in xs if x.dtype.is_floating or x.dtype.is_complex])
                ys = fn(*xs)
            pairs = [(y, ct) for y, ct in zip(ys, cts, strict=True) if ct is not None]
            return tape.gradient([y for y, _ in pairs], xs, [ct for _, ct in pairs])

        return self.run(pulled)(*xs)

    def derivative(self, fn, order=1):
        def derived(x, order=order):
            if order == 0:
                return fn(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = derived(x, order - 1)
            return tape.gradient(y, x)

        return self.run(derived)  # one graph around all orders: no custom gradient goes through three nested ones


class Jax:
    name = "jax"

    def sin(self, x):
        return jnp.sin(x)

    def sum(self, x):
        return jnp.sum(x)


class TensorFlowGraph(TensorFlow):
    def run(self, fn):
        return tf.function(fn)


FRAMEWORKS = {
    "toy": Toy(),
    "torch": Torch(),
    "tensorflow": TensorFlow(),
    "tensorflow:graph": TensorFlowGraph(),
    "jax": Jax(),  # only what the laws need
}
PAIRS = [
    ("toy", "torch"),
    ("toy", "tensorflow"),
    ("toy", "tensorflow:graph"),
    ("torch", "toy"),
    ("tensorflow", "toy"),
]
