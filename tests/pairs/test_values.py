"""Asks that values and gradients are the source framework's own, bit by bit."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

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
    inner = type(pair)(dst, src).wrap(lambda x: dst.sin(x) * x)
    pair.assert_native(lambda x: inner(x * 2) + x, dst.tensor(sample((3,))))


def test_a_chain_of_native_and_wrapped_steps_has_the_gradient_of_the_whole(pair, src, dst):
    wrapped = pair.wrap(src.square)
    gradient = dst.gradient(lambda x: dst.sin(wrapped(dst.exp(x))), dst.tensor([0.1, 0.2], "float64"))
    x = np.array([0.1, 0.2])
    np.testing.assert_allclose(gradient, np.cos(np.exp(2 * x)) * 2 * np.exp(2 * x), rtol=1e-12)


STEPS = st.lists(st.sampled_from(["sin", "tanh", "square", "exp_neg", "scale", "reverse", "cumsum", "softmax"]), max_size=4)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@hypothesis.given(steps=STEPS, shape=SHAPES, seed=st.integers(0, 99))
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
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
