"""Asks that what JAX narrows, while 64 bits are off, has its own dtype in every derivative, and the right value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.precision import jax_has_32_bits

__all__ = ["jax_has_32_bits"]

pytestmark = pytest.mark.filterwarnings("ignore::polybridge.PrecisionWarning")

X, W = 2.0, 3.0  # of x**3 * w**2, whose derivatives are below


def of_jax(n, x, w):
    return n + 1, x**3 * w**2, jnp.ones(2)


def test_gradients_into_jax_have_the_dtypes_of_the_callers_tensors():
    f = polybridge.wrap(of_jax, src="jax", dst="tf")
    n, x, w, ct = tf.constant([1]), tf.constant([X], tf.float64), tf.constant([W]), tf.constant([1.0])
    with tf.GradientTape(persistent=True) as third:
        third.watch([x, w, ct])
        with tf.GradientTape(persistent=True) as second:
            second.watch([x, w, ct])
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([x, w])
                y = f(n, x, w)[1]
            gx, gw = tape.gradient(y, [x, w], ct)
        gxx, gxw, gxct = second.gradient(gx, [x, w, ct])
        gwx, gww, gwct = second.gradient(gw, [x, w, ct])
    gxxx, gxxct = third.gradient(gxx, [x, ct])
    found = {
        "float32": [y, gw, gxw, gxct, gww, gwct, gxxct],
        "float64": [gx, gxx, gwx, gxxx],
    }
    expected = {
        "float32": [X**3 * W**2, 2 * X**3 * W, 6 * X**2 * W, 3 * X**2 * W**2, 2 * X**3, 2 * X**3 * W, 6 * X * W**2],
        "float64": [3 * X**2 * W**2, 6 * X * W**2, 6 * X**2 * W, 6 * W**2],
    }
    for dtype, tensors in found.items():
        assert [t.dtype.name for t in tensors] == [dtype] * len(tensors)
        np.testing.assert_allclose([float(t[0]) for t in tensors], expected[dtype])


def of_torch(x, w, unused):
    return torch.arange(2), (x.double() ** 3 * w).sum(), w.double().square().sum(), x * 1


def of_tensorflow(x, w, unused):
    double = tf.cast(x, tf.float64) ** 3 * tf.cast(w, tf.float64)
    return tf.range(2), tf.reduce_sum(double), tf.reduce_sum(tf.cast(w, tf.float64) ** 2), x * 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("src, fn", [("torch", of_torch), ("tf", of_tensorflow)])
def test_cotangents_from_jax_have_the_dtypes_of_the_functions_results(src, fn, compiled):
    def native(x, w):
        return (x**3 * w).sum(), (w**2).sum(), x * 1

    def derivatives(f):
        def total(x, w):
            y, z, same = f(x, w)
            return y * z + same.sum()

        g = jax.grad(total, (0, 1))
        h = jax.jacrev(jax.grad(total, (0, 1)), (0, 1))
        only = jax.grad(lambda w: f(x, w)[1])  # the first result has no influence
        third = jax.grad(lambda w: jax.grad(lambda w: jax.grad(total, 1)(x, w).sum())(w).sum())
        results = [f(x, w), g(x, w), h(x, w), jax.grad(lambda w: only(w).sum())(w), third(w)]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]

    x, w = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])
    wrapped = polybridge.wrap(fn, src=src, dst="jax")
    call = jax.jit(wrapped) if compiled else wrapped
    found, expected = derivatives(lambda x, w: call(x, w, x)[1:]), derivatives(native)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, strict=True)
