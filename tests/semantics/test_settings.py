"""Asks that what the frameworks have set, for the process or a thread, does to a call what it does natively."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.fx
from torch.autograd import forward_ad

import polybridge
from tests.precision import jax_has_32_bits as jax_has_32_bits
from tests.semantics.calls import to_tf, with_gradient

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


@contextlib.contextmanager
def halves():
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("first", [False, True], ids=["later", "at first"])
@pytest.mark.parametrize(
    ("mode", "fn", "narrow"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda x: x @ x, "bfloat16"),
        (halves, lambda x: x.half() @ torch.ones(2, 2).half() * torch.ones(2, 2), "float16"),
    ],
    ids=["autocast", "default dtype"],
)
def test_jax_traces_a_call_anew_in_another_mode_of_torch(mode, fn, narrow, first):
    f = polybridge.wrap(fn, src="torch", dst="jax")
    x = jnp.ones((2, 2))
    for inside in (first, not first, first):
        with mode() if inside else contextlib.nullcontext():
            y, pull = jax.vjp(lambda x: f(x) * 1, x)
            compiled = jax.jit(lambda x: f(x) * 1)(x)
            gradient = jax.jit(jax.grad(lambda x: f(x).astype(jnp.float32).sum()))(x)
        dtype = narrow if inside else "float32"
        assert (y.dtype, compiled.dtype) == (dtype, dtype)
        np.testing.assert_array_equal(compiled.astype("float32"), np.full((2, 2), 2.0))
        np.testing.assert_array_equal(gradient, pull(jnp.ones_like(y))[0])


def test_a_graph_is_traced_under_the_anomaly_detection_of_torch():
    f = to_tf(curve)

    @tf.function
    def second(x):
        return with_gradient(lambda x: with_gradient(f, x)[1], x)[1]

    with torch.autograd.set_detect_anomaly(True):
        np.testing.assert_allclose(second(tf.constant(X)), SECOND, rtol=1e-5)
        assert torch.is_anomaly_check_nan_enabled()


class Embedded:
    """Parts of a call that make tensors of their own: ones, zeros, placeholders, seeds, rows of a gradient."""

    two = staticmethod(polybridge.wrap(lambda x: (tf.sin(x), x * x), src="tf", dst="torch"))

    @staticmethod
    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(Embedded.two(forward_ad.make_dual(x, 2 * x / x))[0]).tangent

    @staticmethod
    def rows(x):
        f = polybridge.wrap(lambda w: tf.gather(w, [0, 0, 2]), src="tf", dst="torch", sparse=True)
        w = x.clone().requires_grad_()
        return torch.autograd.grad(f(w), w, x / x)[0].to_dense()

    @staticmethod
    def weight(x):
        f = tf.function(to_tf(lambda y: y * x))
        return torch.from_numpy(f(tf.constant(X)).numpy())

    @staticmethod
    def batched(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(Embedded.two(x)[0], x, torch.diag(x), is_grads_batched=True)[0]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: torch.func.jvp(lambda x: Embedded.two(x)[0], (x,), (x,))[1], np.cos(X) * X),
        (lambda x: torch.func.vmap(Embedded.two)(x[:0, None])[0], np.zeros((0, 1))),
        (Embedded.dual, 2 * np.cos(X)),
        (Embedded.rows, [2, 0, 1]),
        (Embedded.weight, X * X),
        (Embedded.batched, np.diag(X * np.cos(X))),
    ],
    ids=["jvp", "empty batch", "forward mode", "rows", "weight in a graph", "batched backward"],
)
def test_the_default_device_of_torch_is_for_the_user_alone(call, expected):
    x = torch.tensor(X)
    with torch.device("meta"):  # such as cuda, where there is one
        found = call(x)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5)


def test_a_module_draws_its_seed_whatever_the_default_device_of_torch():
    net = polybridge.wrap(keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)]), dst="torch")
    x = torch.ones(64, 3)
    with torch.device("meta"):
        y = net(x)
    assert set(y.unique().tolist()) == {0, 2}


def test_a_proxy_of_torch_fx_is_refused_by_name():
    f = polybridge.wrap(tf.sin, src="tf", dst="torch")
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\] .* a Proxy is not a dense tensor"):
        torch.fx.symbolic_trace(lambda x: f(x) + 1)


wrapped_for_fx = polybridge.wrap(lambda x: tf.sin(x) * x, src="tf", dst="torch")
torch.fx.wrap("wrapped_for_fx")


def test_a_function_that_torch_fx_is_told_of_is_a_node_of_its_graph():
    module = torch.fx.symbolic_trace(lambda x: wrapped_for_fx(x) + 1)
    x = torch.tensor(X, requires_grad=True)
    y = module(x)
    np.testing.assert_allclose(y.detach().numpy(), np.sin(X) * X + 1, rtol=1e-5)
    np.testing.assert_allclose(torch.autograd.grad(y.sum(), x)[0].numpy(), FIRST, rtol=1e-5)


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
