"""TensorFlow's vectorised map, Jacobians and other transforms on functions of other frameworks, against native ones."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.core import residuals

Fn = Callable[..., Any]

jax.config.update("jax_enable_x64", True)
X = tf.constant(np.random.default_rng(0).uniform(0.5, 1.5, (4, 3)))
BATCHES = tf.reshape(X, (2, 2, 3))
W = tf.constant(np.random.default_rng(1).normal(size=(3, 2)))
WS = tf.stack([W, W * 2])
DATA = tf.constant(np.random.default_rng(2).normal(size=(5, 4, 3)))

# Functions that a vectorisation along the wrong axis, or over the whole batch, would give other values for.
NORMALISED: dict[str, Fn] = {
    "tensorflow": lambda x: x**3 / tf.reduce_sum(x),
    "torch": lambda x: x**3 / x.sum(),
    "jax": lambda x: x**3 / x.sum(),
}
LAYER: dict[str, Fn] = {
    "tensorflow": lambda x, w: tf.tanh(tf.matmul(x, w)),
    "torch": lambda x, w: torch.tanh(x @ w),
    "jax": lambda x, w: jnp.tanh(x @ w),
}


def grad(f: Fn) -> Fn:
    def differentiated(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return differentiated


def jacobian(f: Fn, **options: Any) -> Fn:
    def differentiated(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x, **options)

    return differentiated


def batch_jacobian(f: Fn) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = mapped(f)(X)
    return tape.batch_jacobian(y, X)


def pushed(f: Fn, x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, x * 2) as accumulator:
        y = f(x)
    return accumulator.jvp(y)


def mapped(f: Fn) -> Fn:
    return lambda xs: tf.vectorized_map(f, xs)


def looped(f: Fn) -> Fn:
    return lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, f(x)), [0, x])[1]


TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "vmap": lambda f: mapped(f)(X),
    "vmap of vmap": lambda f: mapped(mapped(f))(BATCHES),
    "vmap of tf.function": lambda f: mapped(tf.function(f))(X),
    "vmap of loop": lambda f: mapped(looped(f))(X),
    "vmap of what the examples share": lambda f: mapped(lambda x: f(X[0]) * x)(X),
    "grad of vmap": lambda f: grad(mapped(f))(X),
    "vmap of grad": lambda f: mapped(grad(f))(X),
    "vmap of grad of what the examples share": lambda f: mapped(lambda x: grad(lambda w: f(w) * x)(X[0]))(X),
    "vmap of grad of tf.function": lambda f: mapped(grad(tf.function(f)))(X),
    "vmap of grad of loop": lambda f: mapped(grad(looped(f)))(X),
    "vmap of grad of recompute_grad": lambda f: mapped(grad(tf.recompute_grad(f)))(X),
    "vmap of grad of vmap": lambda f: mapped(grad(mapped(f)))(BATCHES),
    "vmap of vmap of grad": lambda f: mapped(mapped(grad(f)))(BATCHES),
    "vmap of second derivative": lambda f: mapped(grad(grad(f)))(X),
    "vmap of third derivative": lambda f: mapped(grad(grad(grad(f))))(X),
    "grad of vmap of grad": lambda f: grad(mapped(grad(f)))(X),
    "second derivative of vmap": lambda f: grad(grad(mapped(f)))(X),
    "jacobian": lambda f: jacobian(f)(X[0]),
    "jacobian in a loop": lambda f: jacobian(f, experimental_use_pfor=False)(X[0]),
    "jacobian in parts": lambda f: jacobian(f, parallel_iterations=2)(X[0]),
    "jacobian of vmap": lambda f: jacobian(mapped(f))(X),
    "jacobian of jacobian": lambda f: jacobian(jacobian(f))(X[0]),
    "batch_jacobian of vmap": batch_jacobian,
    "hessian": lambda f: jacobian(grad(f))(X[0]),
    "vmap of jacobian": lambda f: mapped(jacobian(f))(X),
    "vmap of hessian": lambda f: mapped(jacobian(grad(f)))(X),
    "vmap of jacobian of jacobian": lambda f: mapped(jacobian(jacobian(f)))(X),
    "grad of vmap of jacobian": lambda f: grad(mapped(jacobian(f)))(X),
    "forward": lambda f: pushed(f, X),
    "forward over vmap": lambda f: pushed(mapped(f), X),
    "forward over grad": lambda f: pushed(grad(f), X),
    "recompute_grad": lambda f: grad(tf.recompute_grad(f))(X),
}
WITH_WEIGHTS: dict[str, Callable[[Fn], Any]] = {
    "gradients of examples": lambda f: mapped(lambda x: grad(lambda w: f(x, w))(W))(DATA),
    "ensemble": lambda f: mapped(lambda w: f(DATA[0], w))(WS),
    "shared weights": lambda f: grad(lambda w: mapped(lambda x: f(x, w))(DATA) ** 2)(W),
    "two batches": lambda f: mapped(lambda w: mapped(lambda x: f(x, w))(DATA))(WS),
    "gradients of two batches": lambda f: mapped(lambda w: mapped(lambda x: grad(lambda w: f(x, w))(w))(DATA))(WS),
    "weights of gradients": lambda f: grad(lambda w: mapped(lambda x: grad(lambda x: f(x, w))(x))(DATA) ** 2)(W),
}
CASES = [
    pytest.param(function, transform, id=f"{kind}{name}")
    for kind, function, table in (("", NORMALISED, TRANSFORMS), ("layer: ", LAYER, WITH_WEIGHTS))
    for name, transform in table.items()
]


def into_tf(fn: Fn, src: str = "torch", **options: Any) -> Fn:
    return polybridge.wrap(fn, src=src, dst="tf", **options)


@pytest.fixture(autouse=True)
def fresh_variable_scope() -> None:
    """A loop that raised leaves a caching device in the default scope, which `tf.recompute_grad` refuses."""
    tf.compat.v1.reset_default_graph()


@pytest.fixture(params=["torch", "jax"])
def src(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["eager", "tf.function"])
def staged(request: pytest.FixtureRequest) -> Callable[[Fn], Fn]:
    return tf.function if request.param == "tf.function" else lambda f: f


@pytest.mark.parametrize(("function", "transform"), CASES)
def test_a_transform_gives_what_it_gives_of_a_native_function(
    function: dict[str, Fn], transform: Callable[[Fn], Any], staged: Callable[[Fn], Fn], src: str
) -> None:
    wrapped, native = into_tf(function[src], src), function["tensorflow"]
    found = staged(lambda: tf.convert_to_tensor(transform(wrapped)))()
    np.testing.assert_allclose(found, transform(native), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "vmap of jacobian", "vmap of second derivative"])
def test_the_size_of_the_batch_may_be_unknown(name: str) -> None:
    body = {"vmap": lambda f: f, "vmap of grad": grad, "vmap of jacobian": jacobian}.get(name, lambda f: grad(grad(f)))
    wrapped = into_tf(NORMALISED["torch"])
    traced = tf.function(mapped(body(wrapped)), input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    for xs in (X, X[:2]):
        np.testing.assert_allclose(traced(xs), mapped(body(NORMALISED["tensorflow"]))(xs), rtol=1e-10)


def test_reduce_retracing_keeps_one_graph_for_all_sizes() -> None:
    step = tf.function(grad(into_tf(NORMALISED["torch"])), reduce_retracing=True)
    for n in (2, 3, 4, 5):
        x = tf.ones([n], tf.float64)
        np.testing.assert_allclose(step(x), grad(NORMALISED["tensorflow"])(x), rtol=1e-12)
    assert step.experimental_get_tracing_count() <= 2


def test_a_batch_is_one_evaluation_by_the_source(staged: Callable[[Fn], Fn]) -> None:
    runs = []

    def square(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            runs.append(x.shape)
        return x * x

    wrapped = into_tf(square)
    call = staged(lambda: mapped(grad(wrapped))(X))
    call()  # runs on placeholders too
    runs.clear()
    call()
    assert runs == [(3,)]


def test_a_gradient_in_a_map_that_nobody_reads_is_no_error() -> None:
    wrapped = into_tf(torch.square)
    found = tf.function(lambda: mapped(lambda x: (grad(wrapped)(x), wrapped(x))[1])(X))()
    np.testing.assert_allclose(found, X**2)


def test_a_gradient_that_nobody_reads_beside_a_value_that_is_read() -> None:
    wrapped = into_tf(torch.square)

    def value(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrapped(x)
        tape.gradient(y, x)
        return y

    np.testing.assert_allclose(tf.function(lambda: mapped(value)(X))(), X**2)


def test_a_jacobian_evaluates_once(staged: Callable[[Fn], Fn]) -> None:
    runs = []

    def square(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            runs.append(1)
        return x * x

    wrapped = into_tf(square)
    found = staged(lambda: jacobian(wrapped)(X[0]))()
    np.testing.assert_allclose(found, np.diag(2 * X[0].numpy()))
    assert runs == [1]


# What the source cannot vectorise.


def written(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(3, dtype=torch.float64)
    buffer += x  # torch.vmap refuses to write a batch to what is none
    return buffer * x


def test_a_loop_is_right_and_said_once(staged: Callable[[Fn], Fn]) -> None:
    wrapped = into_tf(written)
    step = staged(lambda: mapped(grad(wrapped))(X))
    with pytest.warns(polybridge.LoopWarning, match="written"):
        found = step()
    np.testing.assert_allclose(found, 2 * X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", polybridge.LoopWarning)
        np.testing.assert_allclose(step(), 2 * X)


def test_a_function_of_numpy_with_a_rule_is_looped() -> None:
    rule = (lambda x: (x**3, x), lambda x, ct: (3 * x**2 * ct,))
    wrapped = into_tf(lambda x: x**3, "numpy", vjp=rule, output_specs=polybridge.TensorSpec((3,), "float64"))
    with pytest.warns(polybridge.LoopWarning):
        found = mapped(grad(wrapped))(X)
    np.testing.assert_allclose(found, 3 * X**2)


def test_a_call_without_inputs_runs_for_each_example() -> None:
    sample = into_tf(lambda: torch.rand(3))
    found = mapped(lambda i: sample() + 0 * i)(tf.zeros(2))
    assert (found[0] != found[1]).numpy().all()


# Random functions: y = mask x, of which the derivative in x is the same mask.


def test_each_example_has_a_mask_of_its_own_and_its_backward_the_same(staged: Callable[[Fn], Fn]) -> None:
    wrapped = into_tf(lambda x: torch.nn.functional.dropout(x) * x)

    def both(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrapped(x)
        return 2 * y, tape.gradient(y, x)

    y, gradient = staged(lambda: mapped(both)(tf.ones([3, 1000])))()
    np.testing.assert_array_equal(y, gradient)
    assert (y[0] != y[1]).numpy().any() and 0.4 < (y.numpy() == 0).mean() < 0.6


# Structures and dtypes.


def test_integers_pass_beside_what_is_differentiated() -> None:
    wrapped = into_tf(lambda x, i: (x[i], i + 1, x.argmax()))
    x, i = tf.constant([[1.0, 5.0], [7.0, 2.0]]), tf.constant([[0, 0, 1], [1, 1, 0]])
    found = mapped(lambda pair: wrapped(*pair))((x, i))
    for y, expected in zip(found, ([[1, 1, 5], [2, 2, 7]], [[1, 1, 2], [2, 2, 1]], [1, 0]), strict=True):
        np.testing.assert_array_equal(y, expected)
    gradient = mapped(lambda pair: grad(lambda x: wrapped(x, pair[1])[0])(pair[0]))((x, i))
    np.testing.assert_array_equal(gradient, [[2, 1], [1, 2]])


def test_complex_numbers_have_native_gradients_in_a_map() -> None:
    z = tf.constant([[1 + 2j, 3 - 1j], [2j, 1]])
    found = mapped(grad(into_tf(lambda z: z * z * z.conj())))(z)
    np.testing.assert_allclose(found, grad(lambda z: z * z * tf.math.conj(z))(z))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (1, 1)], ids=str)
def test_dtypes_and_shapes_pass_a_map(dtype: str, shape: tuple[int, ...]) -> None:
    x = tf.cast(np.random.default_rng(0).integers(0, 2, (2, *shape)), dtype)
    found = mapped(into_tf(torch.clone))(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


# What an unknown plan must not mix up: `output_specs` tell nothing of which inputs have an influence.


def test_an_input_without_influence_has_no_share_in_the_second_derivative_of_the_other() -> None:
    wrapped = into_tf(lambda a, b: a**3, output_specs=polybridge.TensorSpec((3,), "float64"))

    @tf.function
    def second(a: Any, b: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch((a, b))
            with tf.GradientTape() as inner:
                inner.watch((a, b))
                y = wrapped(a, b)
            da, db = inner.gradient(y, (a, b))
            weighted = da + 100 * db
        return outer.gradient(weighted, (a, b))

    da, db = second(X[0], X[1])
    np.testing.assert_allclose(da, 6 * X[0])
    np.testing.assert_array_equal(db, [0, 0, 0])


# Memory, and other people's operations.


def test_an_eager_jacobian_or_map_keeps_no_residual() -> None:
    wrapped = into_tf(torch.sin)
    gc.collect()
    before = len(residuals._residuals)
    for _ in range(3):
        jacobian(wrapped)(X[0])
        mapped(grad(wrapped))(X)
    gc.collect()
    assert len(residuals._residuals) == before


def test_weights_that_a_module_holds_are_named_in_a_map(staged: Callable[[Fn], Fn]) -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    wrapped = into_tf(lambda x: layer(x))
    with pytest.warns(polybridge.DetachedStateWarning, match="weight"):
        staged(lambda: mapped(wrapped)(X))()


def test_a_py_function_of_somebody_else_is_converted_as_before() -> None:
    def double(x: Any) -> Any:
        return tf.py_function(lambda x: x * 2, [x], tf.float64)

    np.testing.assert_array_equal(mapped(double)(X), 2 * X)
    with pytest.raises(ValueError, match="No pfor vectorization defined for EagerPyFunc"):
        tf.vectorized_map(double, X, fallback_to_while_loop=False)


def test_a_call_needs_no_fallback() -> None:
    found = tf.vectorized_map(into_tf(torch.square), X, fallback_to_while_loop=False)
    np.testing.assert_allclose(found, X**2)


def pushed_gradient(f: Fn, x: Any) -> Any:
    return pushed(grad(f), x)


def gradient_of_push(f: Fn, x: Any) -> Any:
    return grad(lambda x: pushed(f, x))(x)


def pushed_twice(f: Fn, x: Any) -> Any:
    ones = tf.ones_like(x)  # TensorFlow loses what depends on x in the tangents of an accumulator inside of another
    with tf.autodiff.ForwardAccumulator(x, ones) as outer:
        with tf.autodiff.ForwardAccumulator(x, ones) as inner:
            y = f(x)
        first = inner.jvp(y)
    return outer.jvp(first)


@pytest.mark.parametrize("middle", ["torch", "jax"])
@pytest.mark.parametrize("compiled", [False, True], ids=["function", "tf.function"])
@pytest.mark.parametrize("derivative", [pushed, pushed_gradient, gradient_of_push, pushed_twice])
def test_forward_mode_passes_tensorflow_inside_of_another_framework(
    derivative: Callable[[Fn, Any], Any], compiled: bool, middle: str
) -> None:
    def native(x: Any) -> Any:
        return tf.sin(x) * x

    inner = polybridge.wrap(tf.function(native) if compiled else native, src="tensorflow", dst=middle)
    f = polybridge.wrap(lambda x: inner(x * x) * x, src=middle, dst="tensorflow")
    np.testing.assert_allclose(derivative(f, X), derivative(lambda x: native(x * x) * x, X))


@pytest.mark.parametrize("middle", ["torch", "jax"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_a_function_that_differentiates_tensorflow_may_be_recomputed(middle: str, compiled: bool) -> None:
    inner = polybridge.wrap(lambda x: tf.sin(x) * x, src="tensorflow", dst=middle)
    source = {
        "torch": torch.func.grad(lambda x: inner(x).sum()),
        "jax": jax.grad(lambda x: inner(x).sum()),
    }[middle]
    f = polybridge.wrap(source, src=middle, dst="tensorflow")  # `tf.recompute_grad` stops all tapes while it evaluates

    def value_and_gradient(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.recompute_grad(f)(x)
        return y, tape.gradient(y, x)

    y, gradient = (tf.function(value_and_gradient) if compiled else value_and_gradient)(X)
    np.testing.assert_allclose(y, tf.sin(X) + X * tf.cos(X))
    np.testing.assert_allclose(gradient, 2 * tf.cos(X) - X * tf.sin(X))
