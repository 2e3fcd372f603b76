"""For each mode of the grid: the value, gradient and second derivative of x**3 * sin(x), by the caller's own means."""

from __future__ import annotations

from typing import Any

import numpy as np

import polybridge

Numbers = tuple[Any, Any, Any]
X = np.array([0.5, -1.25, 2.0])


def _cubic_tf(x: Any) -> Any:
    import tensorflow as tf

    return x**3 * tf.sin(x)


def _cubic_torch(x: Any) -> Any:
    import torch

    return x**3 * torch.sin(x)


def torch_from_eager() -> Numbers:
    return _in_torch(_cubic_tf)


def torch_from_function() -> Numbers:
    import tensorflow as tf

    return _in_torch(tf.function(_cubic_tf))


def torch_from_session() -> Numbers:
    import tensorflow as tf

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float64, [None])
        y = _cubic_tf(x)
        session = tf.compat.v1.Session()
    return _in_torch(polybridge.tf1.graph_function(session, [x], y))


def tensorflow_eager() -> Numbers:
    return _orders_tf(polybridge.wrap(_cubic_torch, src="torch", dst="tf"))


def tensorflow_function() -> Numbers:
    import tensorflow as tf

    wrapped = polybridge.wrap(_cubic_torch, src="torch", dst="tf")
    return tf.function(lambda x: _tapes(wrapped, x))(tf.constant(X))


def tensorflow_session() -> Numbers:
    import tensorflow as tf

    wrapped = polybridge.wrap(_cubic_torch, src="torch", dst="tf")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float64, [None])
        y = wrapped(x)
        (first,) = tf.gradients(y, x)
        (second,) = tf.gradients(first, x)
        return session.run((y, first, second), {x: X})


def numpy_from_tensorflow() -> Numbers:
    import tensorflow as tf

    return _in_numpy(_cubic_tf, tf.reduce_sum, "tf")


def numpy_from_torch() -> Numbers:
    import torch

    return _in_numpy(_cubic_torch, torch.sum, "torch")


def _in_numpy(fn: Any, sum_: Any, src: str) -> Numbers:
    summed = polybridge.wrap(lambda x: sum_(fn(x)), src=src, dst="numpy")
    return polybridge.wrap(fn, src=src, dst="numpy")(X), summed.grad(X), summed.hessian(X).diagonal()


def _in_torch(fn: Any) -> Numbers:
    import torch

    wrapped = polybridge.wrap(fn, src="tf", dst="torch")
    x = torch.tensor(X, requires_grad=True)
    y = wrapped(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return y.detach().numpy(), first.detach().numpy(), second.numpy()


def _orders_tf(wrapped: Any) -> Numbers:
    import tensorflow as tf

    return _tapes(wrapped, tf.constant(X))


def _tapes(wrapped: Any, x: Any) -> Numbers:
    import tensorflow as tf

    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = wrapped(x)
        first = inner.gradient(y, x)
    return y, first, outer.gradient(first, x)
