"""Asks that what the frameworks have set, for the process or a thread, does to a call what it does natively."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.precision import jax_has_32_bits as jax_has_32_bits
from tests.semantics.calls import to_tf

X = np.array([0.5, 1.0, 2.0], np.float32)
FIRST, SECOND = np.sin(X) + X * np.cos(X), 2 * np.cos(X) - X * np.sin(X)


def curve(x):
    return torch.sin(x) * x


# torch.


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_jax_differentiates_in_the_inference_mode_of_torch(jit):
    def derivatives(x):
        first = jax.grad(lambda x: f(x).sum())
        return first(x), jax.grad(lambda x: first(x).sum())(x)

    f = polybridge.wrap(curve, src="torch", dst="jax")
    with torch.inference_mode():
        for _ in range(2):  # the second one on memory that is shared
            first, second = (jax.jit(derivatives) if jit else derivatives)(jnp.asarray(X))
        assert torch.is_inference_mode_enabled()
    np.testing.assert_allclose(first, FIRST, rtol=1e-5)
    np.testing.assert_allclose(second, SECOND, rtol=1e-5)


def test_numpy_differentiates_in_the_inference_mode_of_torch():
    f = polybridge.wrap(lambda x: curve(x).sum(), src="torch", dst="numpy")
    with torch.inference_mode():
        for _ in range(2):
            np.testing.assert_allclose(f.grad(X), FIRST, rtol=1e-5)
            np.testing.assert_allclose(f.hessian(X), np.diag(SECOND), rtol=1e-5)


def test_a_graph_is_traced_under_the_anomaly_detection_of_torch():
    f = to_tf(curve)

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    with torch.autograd.set_detect_anomaly(True):
        np.testing.assert_allclose(second(tf.constant(X)), SECOND, rtol=1e-5)
        assert torch.is_anomaly_check_nan_enabled()


# JAX.


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("src", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(jnp.array([-1.0, 4.0])),
        lambda f: jax.jit(f)(jnp.array([-1.0, 4.0])),
        lambda f: jax.vjp(f, jnp.array([-1.0, 4.0])),
        lambda f: jax.vmap(f)(jnp.array([-1.0, 4.0])),
    ],
    ids=["eager", "jit", "vjp", "vmap"],
)
def test_a_nan_is_found_by_debug_nans(src, call):
    f = polybridge.wrap({"torch": torch.sqrt, "tensorflow": tf.sqrt}[src], src=src, dst="jax")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in sqrt"):
        call(f)
    with jax.debug_nans(True):
        assert f(jnp.array([9.0, 4.0])).tolist() == [3, 2]


def test_an_infinite_gradient_is_found_by_debug_infs():
    f = polybridge.wrap(torch.sqrt, src="torch", dst="jax")
    _, pull = jax.vjp(f, jnp.array([0.0, 4.0]))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"invalid value \(inf\) encountered in sqrt"):
        pull(jnp.ones(2))
