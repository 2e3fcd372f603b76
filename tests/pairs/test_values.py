"""Asks that values and gradients are the source framework's own, bit by bit."""

from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.pairs.dialects import assert_identical, sample

UNARY = {
    "sin": lambda m: m.sin,
    "exp": lambda m: m.exp,
    "tanh": lambda m: m.tanh,
    "abs": lambda m: m.abs,
    "square": lambda m: m.square,
    "softmax": lambda m: m.softmax,
    "sum": lambda m: m.sum,
    "sum_rows": lambda m: lambda x: m.sum(x, axis=0),
    "max": lambda m: lambda x: m.max(x, axis=-1),
    "cumsum": lambda m: lambda x: m.cumsum(x, axis=1),
    "transpose": lambda m: lambda x: m.transpose(x, (1, 0)),
    "reshape": lambda m: lambda x: m.reshape(x, (2, 10)),
    "slice": lambda m: lambda x: x[1:, ::2],
    "element": lambda m: lambda x: x[2, 3],
    "identity": lambda m: m.identity,
    "power": lambda m: lambda x: x**3,
    "concat": lambda m: lambda x: m.concat([x, x * 2], axis=1),
    "own_transpose_product": lambda m: lambda x: x @ m.transpose(x, (1, 0)),
    "branch_on_values": lambda m: lambda x: x * 2 if float(m.stop_gradient(m.sum(x))) > 0 else x * 3,
    "constant": lambda m: lambda x: x * 0 + m.tensor(1.5),
}
BINARY = {
    "add": lambda m: lambda a, b: a + b,
    "multiply": lambda m: lambda a, b: a * b,
    "divide": lambda m: lambda a, b: a / b,
    "maximum": lambda m: m.maximum,
    "where": lambda m: lambda a, b: m.where(a > b, a * 2, b),
    "broadcast": lambda m: lambda a, b: a[:, None] * b[None],
    "product_with_transpose": lambda m: lambda a, b: a @ m.transpose(b, (1, 0)),
}


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
@pytest.mark.parametrize("make", UNARY.values(), ids=UNARY)
def test_functions_of_one_tensor_have_native_values_and_gradients(pair, make):
    pair.assert_native(make(pair.src), pair.dst.tensor(sample((4, 5))))


@pytest.mark.parametrize("make", BINARY.values(), ids=BINARY)
def test_functions_of_two_tensors_have_native_values_and_gradients(pair, make):
    a, b = pair.dst.tensor(sample((4, 5), seed=1)), pair.dst.tensor(sample((4, 5), seed=2))
    pair.assert_native(make(pair.src), a, b)


def test_results_are_tensors_of_the_caller(pair, src, dst):
    wrapped = pair.wrap(src.sin)
    assert dst.is_tensor(wrapped(dst.tensor([1.0, 2.0])))
    assert dst.is_tensor(wrapped(dst.tensor(1.0)))


def test_the_function_sees_tensors_of_its_own_framework(pair, src, dst):
    seen = []
    pair.wrap(lambda x: seen.append(x) or x * 1)(dst.tensor([1.0]))
    assert all(map(src.is_tensor, seen))


def test_gradient_of_a_function_of_values_is_analytic(pair, src, dst):
    gradient = dst.gradient(pair.wrap(lambda x: src.exp(src.sin(x))), dst.tensor([0.3, -1.2], "float64"))
    x = np.array([0.3, -1.2])
    np.testing.assert_allclose(gradient, np.exp(np.sin(x)) * np.cos(x), rtol=1e-12)


@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, np.finfo("f4").max])
def test_special_values_cross_unchanged(pair, src, dst, special):
    x = np.array([special, 1.0], "float32")
    assert_identical(dst.numpy(pair.wrap(src.copy)(dst.tensor(x))), x)


def test_the_payload_of_a_nan_crosses_unchanged(pair, src, dst):
    x = np.array([0x7FC12345, 0xFFC00001], "uint32").view("float32")
    assert_identical(dst.numpy(pair.wrap(src.copy)(dst.tensor(x))), x)


def test_denormals_are_flushed_only_where_the_source_does(pair):
    pair.assert_native(lambda t: t * 1.0, pair.dst.tensor(np.array([1e-40, 3e-39], "float32")))


def test_a_large_tensor_crosses_whole(pair, src, dst):
    x = sample((1 << 20,))
    assert_identical(dst.numpy(pair.wrap(lambda t: t * 2)(dst.tensor(x))), x * 2)


def test_a_function_of_another_wrapped_function_has_its_gradient(pair, src, dst):
    """dst -> src -> dst."""
    inner = pair.reversed().wrap(lambda x: dst.sin(x) * x)
    pair.assert_native(lambda x: inner(x * 2) + x, dst.tensor(sample((3,))))


def test_a_chain_of_native_and_wrapped_steps_has_the_gradient_of_the_whole(pair, src, dst):
    wrapped = pair.wrap(src.square)
    gradient = dst.gradient(lambda x: dst.sin(wrapped(dst.exp(x))), dst.tensor([0.1, 0.2], "float64"))
    x = np.array([0.1, 0.2])
    np.testing.assert_allclose(gradient, np.cos(np.exp(2 * x)) * 2 * np.exp(2 * x), rtol=1e-12)


# The same as of native code in what happens around the call.


def test_backward_uses_the_dropout_mask_of_the_forward_in_tensorflow():
    """Case 59."""
    x = tf.ones([1000])
    dropout = torch.nn.Dropout(0.5)
    wrapped = polybridge.wrap(lambda x: dropout(x), src="torch", dst="tensorflow")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = wrapped(x)
    np.testing.assert_array_equal(tape.gradient(y, x), y)
    assert 0 < np.count_nonzero(y) < 1000


def test_backward_uses_the_dropout_mask_of_the_forward_in_torch():
    x = torch.ones(1000, requires_grad=True)
    y = polybridge.wrap(lambda x: tf.nn.dropout(x, 0.5), src="tensorflow", dst="torch")(x)
    y.sum().backward()
    assert torch.equal(x.grad, y) and 0 < y.count_nonzero() < 1000


def test_second_order_uses_the_dropout_mask_of_the_forward(pair, src, dst):
    dropout = {
        "torch": torch.nn.Dropout(0.5),
        "tensorflow": lambda x: tf.nn.dropout(x, 0.5),
        "jax": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x * 2, 0),
    }[src.name]
    seen = []

    def remembered(fn):
        return lambda x: (seen.append(y := fn(x)), y)[1]

    def dropped(x):
        return dropout(x**3)

    looking = src if dst.traces else dst  # where there are values to see
    wrapped = pair.wrap(remembered(dropped)) if looking is src else remembered(pair.wrap(dropped))
    second = dst.numpy(dst.derivative(dst.derivative(wrapped))(dst.tensor([1.0] * 100)))
    np.testing.assert_array_equal(second, 6 * looking.numpy(seen[0]))


def test_batch_norm_counts_a_training_step_once():
    module = torch.nn.BatchNorm1d(2, affine=False)
    x = tf.random.normal([8, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = polybridge.wrap(lambda x: module(x), src="torch", dst="tensorflow")(x)
    tape.gradient(y, x)
    assert module.num_batches_tracked == 1
    np.testing.assert_allclose(module.running_mean, 0.1 * tf.reduce_mean(x, 0), rtol=1e-5)


def test_the_function_runs_once_for_value_and_gradient(pair, dst):
    calls = []
    wrapped = pair.wrap(lambda x: calls.append(1) or x * 2)
    if dst.traces:
        dst.gradient(wrapped, dst.tensor([1.0]))
        calls.clear()
    dst.gradient(wrapped, dst.tensor([1.0]))
    assert calls == [1]


def test_random_numbers_of_the_source_follow_its_own_seed():
    wrapped = polybridge.wrap(lambda x: x + torch.randn(3), src="torch", dst="tensorflow")
    torch.manual_seed(3)
    native = torch.randn(3).numpy()
    torch.manual_seed(3)
    np.testing.assert_array_equal(wrapped(tf.zeros(3)), native)


def test_many_threads_may_call_one_wrapped_function(pair, src, dst):
    wrapped = pair.wrap(lambda x: src.sin(x) * x)

    def gradient(i):
        return [dst.gradient(wrapped, dst.tensor(np.full(50, i / 7))) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(gradient, range(16))):
            x = i / 7
            np.testing.assert_allclose(found, np.full((5, 50), np.cos(x) * x + np.sin(x)), rtol=1e-12)


def test_a_backward_may_run_on_another_thread_than_its_forward():
    x = torch.tensor([2.0], requires_grad=True)
    y = polybridge.wrap(lambda x: x**3, src="tensorflow", dst="torch")(x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.backward).result()
    assert x.grad.item() == 12.0


def test_autocast_of_the_caller_reaches_a_torch_function():
    """Case 39."""
    wrapped = polybridge.wrap(lambda a: a @ a, src="torch", dst="tensorflow")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wrapped(tf.ones([2, 2])).dtype == tf.bfloat16


def test_no_grad_of_the_caller_reaches_a_torch_function():
    seen = []
    wrapped = polybridge.wrap(lambda a: seen.append(torch.is_grad_enabled()) or a, src="torch", dst="tensorflow")
    with torch.no_grad():
        wrapped(tf.ones(2))
    assert seen == [False]


def test_random_state_and_grad_mode_are_left_as_they_were(pair, src, dst):
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    dst.gradient(pair.wrap(src.sin), dst.tensor([1.0]))
    assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled() == grad


STEPS = ["sin", "tanh", "square", "exp_neg", "scale", "reverse", "cumsum", "softmax"]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@hypothesis.given(steps=st.lists(st.sampled_from(STEPS), max_size=4), shape=SHAPES, seed=st.integers(0, 99))
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_random_programs_on_random_shapes_have_native_values_and_gradients(pair, steps, shape, seed):
    def program(x):
        for step in steps:
            x = _step(pair.src, step, x)
        return x

    pair.assert_native(program, pair.dst.tensor(sample(shape, "float64", seed)))


def _step(m, step, x):
    if step in ("cumsum", "softmax") and not len(x.shape):
        return x
    return {
        "sin": lambda: m.sin(x),
        "tanh": lambda: m.tanh(x),
        "square": lambda: m.square(x),
        "exp_neg": lambda: m.exp(-m.square(x)),
        "scale": lambda: x * 1.5 + 1,
        "reverse": lambda: m.transpose(x, tuple(reversed(range(len(x.shape))))),
        "cumsum": lambda: m.cumsum(x, axis=0),
        "softmax": lambda: m.softmax(x),
    }[step]()
