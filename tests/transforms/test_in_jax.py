"""Every transform of JAX on functions of other frameworks, against the same function in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from jax.test_util import check_grads

import polybridge
from polybridge.core import residuals

Fn = Callable[..., Any]

jax.config.update("jax_enable_x64", True)
X = jnp.array([1.0, 2.0, 4.0])
BATCH = jnp.array(np.random.default_rng(0).uniform(0.5, 1.5, (4, 3)))
Z = jnp.array([1 + 2j, 3 - 1j])
W = jnp.array(np.random.default_rng(1).normal(size=(3, 2)))
DATA = jnp.array(np.random.default_rng(2).normal(size=(5, 4, 3)))

# Functions that a vectorisation along the wrong axis, or over the whole batch, would give other values for.
NORMALISED: dict[str, Fn] = {
    "jax": lambda x: x**3 / x.sum(),
    "torch": lambda x: x**3 / x.sum(),
    "tensorflow": lambda x: x**3 / tf.reduce_sum(x),
}
LAYER: dict[str, Fn] = {
    "jax": lambda x, w: jnp.tanh(x @ w),
    "torch": lambda x, w: torch.tanh(x @ w),
    "tensorflow": lambda x, w: tf.tanh(tf.matmul(x, w)),
}
NOT_HOLOMORPHIC: dict[str, Fn] = {
    "jax": lambda z: z * z * z.conj(),
    "torch": lambda z: z * z * z.conj(),
    "tensorflow": lambda z: z * z * tf.math.conj(z),
}


def loss(f: Fn) -> Fn:
    return lambda x: (f(x) ** 2).sum()


def total(f: Fn) -> Fn:
    return lambda x: f(x).sum()


def power(f: Fn) -> Fn:
    return lambda z: (jnp.abs(f(z)) ** 2).sum()


TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "value": lambda f: f(X),
    "grad": lambda f: jax.grad(loss(f))(X),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f))(X),
    "grad of grad": lambda f: jax.grad(total(jax.grad(loss(f))))(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X * 2,)),
    "vjp": lambda f: jax.vjp(f, X)[1](X),
    "linearize": lambda f: jax.linearize(f, X)[1](X * 3),
    "linear_transpose of linearize": lambda f: jax.linear_transpose(jax.linearize(f, X)[1], X)(X),
    "linear_transpose of vjp": lambda f: jax.linear_transpose(jax.vjp(f, X)[1], X)((X,)),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "jacrev": lambda f: jax.jacrev(f)(X),
    "hessian": lambda f: jax.hessian(loss(f))(X),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(X),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f))(X),
    "jacfwd of hessian": lambda f: jax.jacfwd(jax.hessian(loss(f)))(X),
    "vmap": lambda f: jax.vmap(f)(BATCH),
    "vmap along other axes": lambda f: jax.vmap(f, in_axes=1, out_axes=1)(BATCH),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f))(BATCH.reshape(2, 2, 3)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f)))(BATCH),
    "grad of vmap": lambda f: jax.grad(loss(jax.vmap(f)))(BATCH),
    "vmap of jacrev": lambda f: jax.vmap(jax.jacrev(f))(BATCH),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(loss(f)))(BATCH),
    "vmap of a pullback": lambda f: jax.vmap(jax.vjp(f, X)[1])(BATCH),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f)))(X),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c) * 0.1, c.sum()), x, None, length=5)[1].sum())(
        X
    ),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x.sum() > 0, total(f), jnp.sum, x))(X),
    "while_loop": lambda f: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, X))[1],
    "fori_loop": lambda f: jax.lax.fori_loop(0, 3, lambda _, x: f(x), X),
    "map of grad": lambda f: jax.lax.map(jax.grad(loss(f)), BATCH),
    "eval_shape": lambda f: jnp.zeros(jax.eval_shape(f, X).shape),
}
WITH_WEIGHTS: dict[str, Callable[[Fn], Any]] = {
    "gradients of examples": lambda f: jax.vmap(jax.grad(lambda w, x: f(x, w).sum()), in_axes=(None, 0))(W, DATA),
    "ensemble": lambda f: jax.vmap(f, (None, 0))(DATA[0], jnp.stack([W, W * 2])),
    "shared weights": lambda f: jax.grad(lambda w: (jax.vmap(f, (0, None))(DATA, w) ** 2).sum())(W),
    "two batches": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(DATA, jnp.stack([W, W * 2])),
}
COMPLEX: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: jax.grad(power(f))(Z),
    "jvp": lambda f: jax.jvp(f, (Z,), (Z * 1j,)),
    "vjp": lambda f: jax.vjp(f, Z)[1](Z),
    "jvp of jvp": lambda f: jax.jvp(lambda z: jax.jvp(f, (z,), (z * 1j,))[1], (Z,), (Z,)),
    "grad of jvp": lambda f: jax.grad(lambda z: jnp.abs(jax.jvp(f, (z,), (z * 1j,))[1]).sum())(Z),
    "jacrev of grad": lambda f: jax.jacrev(lambda z: jax.grad(power(f))(z).real)(Z),
}
CASES = [
    pytest.param(function, transform, id=f"{kind}{name}")
    for kind, function, table in (
        ("", NORMALISED, TRANSFORMS),
        ("layer: ", LAYER, WITH_WEIGHTS),
        ("complex: ", NOT_HOLOMORPHIC, COMPLEX),
    )
    for name, transform in table.items()
]


@pytest.fixture(params=["torch", "tensorflow"])
def src(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def into_jax(fn: Fn, src: str = "torch", **options: Any) -> Fn:
    return polybridge.wrap(fn, src=src, dst="jax", **options)


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("function", "transform"), CASES)
def test_a_transform_gives_what_it_gives_of_the_function_in_jax(
    function: dict[str, Fn], transform: Callable[[Fn], Any], staged: bool, src: str
) -> None:
    wrapped = into_jax(function[src], src)
    found = jax.jit(lambda: transform(wrapped))() if staged else transform(wrapped)
    assert_close(found, transform(function["jax"]))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_derivatives_agree_with_differences_to_third_order_in_both_modes(staged: bool, src: str) -> None:
    wrapped = into_jax(NORMALISED[src], src)
    check_grads(jax.jit(wrapped) if staged else wrapped, (X,), order=3, modes=["fwd", "rev"])


def test_a_real_function_through_complex_numbers_has_the_derivatives_of_jax(src: str) -> None:
    fft = {"torch": torch.fft.fft, "tensorflow": lambda x: tf.signal.fft(tf.cast(x, tf.complex128))}[src]
    wrapped, native = into_jax(fft, src), lambda x: jnp.fft.fft(x)

    def second(f: Fn) -> Any:
        return jax.hessian(lambda x: (jnp.abs(f(x)) ** 3).sum())(X)

    for f in (wrapped, jax.jit(wrapped)):
        assert_close(second(f), second(native))


# Dropout: y = mask x, of which the derivative in x is the same mask.

ONES = jnp.ones(1000)


def dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x) * x


def both(x: Any) -> Any:
    y, pull = jax.vjp(into_jax(dropout), x)
    return 2 * y, pull(jnp.ones_like(x))[0]


def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (carry, both(x)), 0.0, None, length=3)[1]


DROPOUTS: dict[str, Callable[[], Any]] = {
    "eager": lambda: both(ONES),
    "jit": lambda: jax.jit(both)(ONES),
    "scan": lambda: scanned(ONES),
    "jit of scan": lambda: jax.jit(scanned)(ONES),
    "vmap": lambda: jax.vmap(both)(jnp.ones((3, 1000))),
    "jit of vmap": lambda: jax.jit(jax.vmap(both))(jnp.ones((3, 1000))),
}


@pytest.mark.parametrize("way", DROPOUTS)
def test_the_backward_uses_the_mask_of_the_forward(way: str) -> None:
    y, gradient = DROPOUTS[way]()
    np.testing.assert_array_equal(y, gradient)
    assert 0.4 < float((y == 0).mean()) < 0.6


@pytest.mark.parametrize("way", ["scan", "jit of scan", "vmap", "jit of vmap"])
def test_each_row_has_a_mask_of_its_own(way: str) -> None:
    y, _ = DROPOUTS[way]()
    assert (y[0] != y[1]).any()


def test_a_function_without_arguments_runs_at_each_call_of_compiled_code() -> None:
    sample = jax.jit(lambda: into_jax(lambda: torch.rand(3))())
    assert (sample() != sample()).all()


def test_the_function_runs_once_per_step() -> None:
    calls = []

    def square(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * x

    wrapped = into_jax(square)
    step = jax.jit(jax.grad(lambda x: wrapped(x).sum()))
    step(X)
    calls.clear()
    for _ in range(3):
        step(X)
    assert len(calls) == 3


def test_a_backward_that_comes_late_evaluates_again_with_the_same_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More steps than residuals are kept for; the generator is put back for the second evaluation."""
    monkeypatch.setattr(residuals._waiting, "entries", 16)
    wrapped = into_jax(dropout)

    def run(x: Any) -> Any:
        ys, pull = jax.vjp(lambda x: jax.lax.map(lambda i: wrapped(x + 0 * i), jnp.arange(100)), x)
        return 2 * ys.sum(0), pull(jnp.ones_like(ys))[0]

    y, gradient = jax.jit(run)(ONES)
    np.testing.assert_allclose(y, gradient)


# Integers, dtypes, structures.


def gathered(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[i], i + 1, x.argmax()


def test_integers_have_no_derivative_and_pass_beside_those_that_have() -> None:
    wrapped, i = into_jax(gathered), jnp.array([0, 0, 2])
    for grad in (jax.grad, lambda f, **options: jax.jit(jax.grad(f, **options))):
        dx, di = grad(lambda x, i: wrapped(x, i)[0].sum(), argnums=(0, 1), allow_int=True)(X, i)
        np.testing.assert_array_equal(dx, [2.0, 0.0, 1.0])
        assert di.dtype == jax.dtypes.float0


def test_an_input_without_influence_has_a_gradient_of_zeros() -> None:
    unused = into_jax(lambda a, b: a * 2)
    for grad in (jax.grad, lambda f, **options: jax.jit(jax.grad(f, **options))):
        assert_close(grad(lambda a, b: unused(a, b).sum(), argnums=(0, 1))(X, X), (X * 0 + 2, X * 0))


def test_trees_static_values_and_keywords_pass_under_jit() -> None:
    wrapped = into_jax(lambda d, *, power: {"y": d["a"] ** power, "name": "cube", "n": d["n"]})
    found = jax.jit(lambda x: wrapped({"a": x, "n": None}, power=3)["y"])(X)
    assert_close(found, X**3)


def test_donated_and_weakly_typed_arguments_are_taken() -> None:
    wrapped = into_jax(lambda x, s: x * s)
    assert float(jax.jit(lambda x: wrapped(x, jnp.asarray(2.0)).sum(), donate_argnums=0)(X + 0)) == 14.0


def test_an_array_that_was_donated_is_refused() -> None:
    x = X + 0
    x.delete()
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\].*deleted"):
        into_jax(torch.sin)(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int8", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (3, 4)], ids=str)
def test_dtypes_and_shapes_pass_under_jit(dtype: str, shape: tuple[int, ...], src: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    found = jax.jit(into_jax({"torch": torch.clone, "tensorflow": tf.identity}[src], src))(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


def test_denormals_are_not_flushed_under_jit() -> None:
    assert float(jax.jit(into_jax(lambda x: x * 1.0))(jnp.float32(1e-40))) == np.float32(1e-40)


# What cannot be.


def test_an_export_is_refused_by_name() -> None:
    with pytest.raises(polybridge.CompilationError, match=r"sin.*jax.export"):
        jax.export.export(jax.jit(into_jax(torch.sin)))(X)


def test_a_transpose_is_had_of_the_linearised_function() -> None:
    wrapped, native = into_jax(lambda x: 2 * x.flip(-1)), lambda x: 2 * x[::-1]
    with pytest.raises(polybridge.NotDifferentiableError, match=r"transposed.*jax\.linearize\(f, zeros\)\[1\]"):
        jax.linear_transpose(wrapped, X)(X)
    linear = jax.linearize(wrapped, 0 * X)[1]
    assert_close(jax.linear_transpose(linear, X)(X), jax.linear_transpose(native, X)(X))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_a_typed_key_is_refused_by_its_path(staged: bool) -> None:
    wrapped = into_jax(lambda tree: tree["x"])
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\]\['key'\].*jax.random.key_data"):
        (jax.jit(wrapped) if staged else wrapped)({"x": X, "key": jax.random.key(0)})


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_an_integer_that_does_not_fit_is_refused_by_its_path(staged: bool) -> None:
    wrapped = into_jax(lambda x: {"n": (x * 2**33).long()})
    with jax.enable_x64(False), pytest.raises(Exception, match=r"result\['n'\] cannot cross.*do not fit into int32"):
        jax.block_until_ready((jax.jit(wrapped) if staged else wrapped)(jnp.ones(2)))


def test_a_shape_that_depends_on_values_asks_for_specs() -> None:
    with pytest.raises(polybridge.PromisedShapeError, match="output_specs="):
        jax.jit(into_jax(lambda x: x[x > 1.5]))(X)


def test_specs_that_are_given_are_used() -> None:
    wrapped = into_jax(lambda x: x[x > 1.5], output_specs=polybridge.TensorSpec((2,), "float64"))
    assert_close(jax.jit(jax.grad(lambda x: wrapped(x).sum()))(X), jnp.array([0.0, 1.0, 1.0]))


def test_specs_may_have_their_dicts_in_another_order() -> None:
    spec = polybridge.TensorSpec((3,), "float64")
    wrapped = into_jax(lambda x: {"b": 2 * x, "a": 3 * x}, output_specs={"a": spec, "b": spec})
    assert_close(jax.jit(wrapped)(X), {"a": 3 * X, "b": 2 * X})
    assert_close(jax.jit(jax.grad(lambda x: wrapped(x)["a"].sum()))(X), 0 * X + 3)


def test_a_result_whose_dict_changes_its_order_is_refused() -> None:
    orders = iter(["ab", "ab", "ba"])  # the trace, the first call, the second call
    call = jax.jit(into_jax(lambda x: {key: x * ord(key) for key in next(orders)}))
    assert_close(call(X)["b"], X * ord("b"))
    with pytest.raises(Exception, match=r"returned \{'b': \*, 'a': \*\} at the result"):
        jax.block_until_ready(call(X))


def test_a_function_that_has_changed_since_can_be_traced_again() -> None:
    dtype = [torch.float64]
    wrapped = into_jax(lambda x: x.to(dtype[0]))
    assert jax.jit(lambda x: wrapped(x))(X).dtype == jnp.float64
    dtype[0] = torch.float32
    with pytest.raises(Exception, match=r"returned float32\[3\] at result.*trace it again"):
        jax.block_until_ready(jax.jit(lambda x: wrapped(x))(X))
    assert jax.jit(lambda x: wrapped(x))(X).dtype == jnp.float32


def test_eager_derivatives_follow_results_whose_shape_depends_on_values() -> None:
    """JAX remembers types of results by types of inputs, and these have the same."""
    wrapped = into_jax(lambda x: x[x > 0] ** 3)
    for x in (jnp.array([1.0, 2.0, -1.0]), jnp.array([1.0, 2.0, 3.0]), jnp.array([-1.0, -1.0, 5.0])):
        slope = 3 * x**2 * (x > 0)
        assert_close(jax.grad(lambda x: wrapped(x).sum())(x), slope)
        assert_close(jax.vjp(wrapped, x)[1](wrapped(x))[0], slope * x**3)
        assert_close(jax.linearize(wrapped, x)[1](x), (slope * x)[x > 0])
        assert_close(jax.jacrev(jax.grad(lambda x: wrapped(x).sum()))(x), jnp.diag(6 * x * (x > 0)))


def test_a_function_that_returns_other_shapes_after_a_while_has_their_gradients() -> None:
    natives: list[Fn] = [lambda x: x * 2, lambda x: x.sum(), lambda x: x[:1] * 7]
    mode = [0]
    wrapped = into_jax(lambda x: natives[mode[0]](x))
    for mode[0] in (0, 1, 2, 0, 1):
        native = natives[mode[0]]
        assert_close(jax.grad(loss(wrapped))(X), jax.grad(loss(native))(X))
        assert_close(jax.vmap(jax.grad(loss(wrapped)))(BATCH), jax.vmap(jax.grad(loss(native)))(BATCH))
        assert_close(jax.jit(lambda x: wrapped(x))(X), native(X))
        assert_close(jax.jit(jax.grad(loss(wrapped)))(X), jax.grad(loss(native))(X))


def test_a_result_that_is_not_as_promised_is_refused() -> None:
    wrapped = into_jax(lambda x: x[x > 1.5], output_specs=polybridge.TensorSpec((1,), "float64"))
    with pytest.raises(Exception, match=r"returned float64\[2\] at result, but float64\[1\] was promised"):
        jax.block_until_ready(jax.jit(wrapped)(X))


class Broken(ValueError):
    """An exception of the user's own."""


def broken(x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch._subclasses.FakeTensor):
        raise Broken("no luck")
    return x


def test_an_exception_keeps_its_type_where_nothing_is_compiled() -> None:
    with pytest.raises(Broken):
        jax.vjp(into_jax(broken), X)


def test_an_exception_in_compiled_code_is_in_the_message_and_is_remembered() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no luck"):
        jax.block_until_ready(jax.jit(into_jax(broken))(X))
    assert isinstance(polybridge.last_error(), Broken)


def test_pullbacks_of_several_calls_cannot_be_batched_as_one() -> None:
    wrapped = into_jax(torch.sin)
    pulls = jax.lax.map(lambda x: jax.vjp(wrapped, x)[1], BATCH)
    with pytest.raises(Exception, match="Differentiate inside of the `vmap`"):
        jax.block_until_ready(jax.vmap(lambda pull, ct: pull(ct))(pulls, BATCH))


def test_the_pullback_of_a_batch_cannot_be_taken_apart() -> None:
    wrapped = into_jax(torch.sin)
    pulls = jax.vmap(lambda x: jax.vjp(wrapped, x)[1])(BATCH)
    with pytest.raises(polybridge.ResidualError, match="Differentiate inside of the `vmap`"):
        jax.tree.map(lambda leaf: leaf[1], pulls)(X)


def test_a_pullback_that_compiled_code_returned_may_be_called_outside() -> None:
    pull = jax.jit(lambda x: jax.vjp(into_jax(NORMALISED["torch"]), x)[1])(X)
    assert_close(pull(X), jax.vjp(NORMALISED["jax"], X)[1](X))


def test_residuals_are_dropped_with_their_pullback() -> None:
    before = set(residuals._residuals)
    for _ in range(3):
        jax.vjp(into_jax(torch.sin), X)
    assert set(residuals._residuals) <= before


def test_a_forward_that_nobody_differentiates_keeps_no_residual() -> None:
    jax.block_until_ready(jax.jit(lambda x: jax.vjp(into_jax(torch.sin), x)[0])(X))
    before = len(residuals._waiting)
    jax.block_until_ready(jax.jit(lambda x: jax.vjp(into_jax(torch.sin), x)[0])(X))
    assert len(residuals._waiting) == before


def test_weights_that_a_module_holds_are_named_under_jit() -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    with pytest.warns(polybridge.DetachedStateWarning, match="weight"):
        jax.block_until_ready(jax.jit(into_jax(lambda x: layer(x)))(X))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_weights_that_a_module_holds_are_named_in_a_batch(staged: bool) -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    wrapped = jax.vmap(into_jax(lambda x: layer(x)))
    with pytest.warns(polybridge.DetachedStateWarning, match="weight"):
        jax.block_until_ready((jax.jit(wrapped) if staged else wrapped)(BATCH))


def test_a_trace_does_not_change_the_state_of_a_tensorflow_function() -> None:
    layer = tf.keras.layers.BatchNormalization(dtype="float64")
    layer.build((None, 3))
    wrapped = into_jax(lambda x: layer(x, training=True), "tensorflow")
    jax.jit(wrapped).lower(BATCH)
    np.testing.assert_array_equal(layer.moving_mean, [0.0, 0.0, 0.0])


def test_a_tensorflow_layer_that_builds_itself_may_be_traced_first() -> None:
    layer = tf.keras.layers.Dense(2, dtype="float64")
    with pytest.warns(polybridge.DetachedStateWarning, match="kernel"):
        found = jax.block_until_ready(jax.jit(into_jax(lambda x: layer(x), "tensorflow"))(BATCH))
    np.testing.assert_allclose(found, BATCH @ layer.kernel.numpy(), rtol=1e-12)


def test_what_a_function_keeps_of_compiled_code_stays_what_it_was(src: str) -> None:
    """The memory that XLA lends a call is gone after it."""
    kept: list[Any] = []
    keeping = jax.jit(into_jax(lambda x: (kept.append(x), x * 2)[1], src))
    values = [np.random.default_rng(seed).normal(size=1000) for seed in range(20)]
    for value in values:
        jax.block_until_ready(keeping(value))
    found = [x.numpy() for x in kept[-len(values) :]]
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_the_gradient_of_a_loop_is_that_of_its_values(staged: bool) -> None:
    """JAX evaluates what does not vary in a loop once for all steps when it differentiates: with one mask."""
    wrapped = into_jax(dropout)

    def run(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry + (y := wrapped(x)).sum(), y), 0.0, None, length=5)

    grad = jax.grad(run, has_aux=True)
    gradient, ys = (jax.jit(grad) if staged else grad)(ONES)
    np.testing.assert_allclose(gradient, 2 * ys.sum(0))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_each_step_of_a_loop_draws_a_mask_of_its_own(staged: bool) -> None:
    wrapped = into_jax(lambda x, step: dropout(x))

    def run(x: Any) -> Any:
        return jax.lax.scan(lambda carry, step: (carry + (y := wrapped(x, step)).sum(), y), 0.0, jnp.arange(5))

    grad = jax.grad(run, has_aux=True)
    gradient, ys = (jax.jit(grad) if staged else grad)(ONES)
    np.testing.assert_allclose(gradient, 2 * ys.sum(0))
    assert all((ys[i] != ys[0]).any() for i in range(1, 5))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_a_branch_that_each_example_takes_or_not_has_its_gradient(staged: bool, src: str) -> None:
    def loss(f: Fn) -> Fn:
        return lambda x: jax.lax.cond(x[0] > 1, lambda x: f(x).sum(), lambda x: (x**2).sum(), x)

    def examples(f: Fn) -> Any:
        grad = jax.vmap(jax.grad(loss(f)))
        return (jax.jit(grad) if staged else grad)(BATCH)

    assert_close(examples(into_jax(NORMALISED[src], src)), examples(NORMALISED["jax"]))


def twice(f: Fn) -> Fn:
    return lambda x: f(f(x))


def shortened(f: Fn) -> Fn:
    return lambda x: f(x[:2])


BRANCHES: dict[str, Callable[[Fn, Fn], tuple[Fn, Fn]]] = {
    "two functions": lambda f, g: (f, g),
    "of other results": lambda f, g: (f, lambda x: g(x)[:1]),
    "one function": lambda f, _: (f, lambda x: -f(2 * x)),
    "one function twice": lambda f, _: (twice(f), f),
    "one function of other inputs": lambda f, _: (f, shortened(f)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_examples_that_take_several_branches_have_the_gradient_of_their_own(name: str) -> None:
    def examples(f: Fn, g: Fn) -> Fn:
        one, other = BRANCHES[name](f, g)
        loss = lambda x: jax.lax.cond(x[0] > 0, lambda x: one(x).sum(), lambda x: (other(x) ** 2).sum(), x)  # noqa: E731
        return lambda batch: (jax.vmap(jax.grad(loss))(batch), jax.vmap(jax.grad(total(jax.grad(loss))))(batch))

    wrapped = examples(into_jax(lambda x: x.sin() * x.sum()), into_jax(lambda x: (x**3).sum(-1, keepdim=True)))
    native = jax.jit(examples(lambda x: jnp.sin(x) * x.sum(), lambda x: (x**3).sum(-1, keepdims=True)))
    mixed, staged = jnp.array([[0.5, -1.0, 2.0], [-0.5, 1.0, 0.3], [1.5, 0.2, 0.1]]), jax.jit(wrapped)
    assert_close(wrapped(mixed), native(mixed))
    for batch in (mixed, mixed**2, -(mixed**2)):
        assert_close(staged(batch), native(batch))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_each_of_several_branches_has_its_own_mask(staged: bool) -> None:
    wrapped = into_jax(dropout)

    def run(x: Any) -> Any:
        y = jax.lax.cond(x[0] > 0, wrapped, lambda x: wrapped(3 * x), x)
        return y.sum(), y

    grad, signs = jax.vmap(jax.grad(run, has_aux=True)), jnp.array([[1.0], [-1.0], [1.0]])
    gradient, y = (jax.jit(grad) if staged else grad)(ONES * signs)
    np.testing.assert_allclose(gradient * signs, 2 * y)  # of squares


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_a_batch_of_no_examples_has_results_of_none(staged: bool) -> None:
    def both(f: Fn) -> Any:
        def call(x: Any) -> Any:
            return jax.vmap(f)(x), jax.vmap(jax.grad(loss(f)))(x), jax.jacfwd(total(f))(x[:, 0])

        return (jax.jit(call) if staged else call)(BATCH[:0])

    assert_close(both(into_jax(torch.sin)), both(jnp.sin))


def test_batch_norm_counts_a_batch_that_cannot_be_vectorised_once_for_each_example() -> None:
    module = torch.nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
    with pytest.warns(polybridge.LoopWarning):
        jax.vmap(into_jax(lambda x: module(x)))(jnp.stack([DATA[:, 0], DATA[:, 1]]))
    assert module.num_batches_tracked == 2


def test_eager_derivatives_need_no_plan_of_a_function_of_values() -> None:
    wrapped = into_jax(lambda x: x * 2 if x.sum() > 0 else x)
    assert_close(jax.grad(lambda x: wrapped(x).sum())(X), X * 0 + 2)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_python_numbers_may_be_primals_and_tangents(staged: bool) -> None:
    def pushed(f: Fn) -> Any:
        push = lambda x: jax.jvp(lambda x: f(jnp.asarray(x)), (x,), (1.0,))  # noqa: E731
        return (jax.jit(push) if staged else push)(2.0)

    assert_close(pushed(into_jax(torch.sin)), pushed(jnp.sin))


def test_a_pullback_of_eager_code_runs_in_compiled_code() -> None:
    _, pull = jax.vjp(into_jax(NORMALISED["torch"]), X)
    assert_close(jax.jit(pull)(X), jax.vjp(NORMALISED["jax"], X)[1](X))
