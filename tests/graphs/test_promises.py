"""Asks that what a graph was promised of a wrapped function is kept, or refused with a way out."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge import TensorSpec

X = tf.constant([1.0, -2.0, 3.0])


def to_tf(fn, **options):
    """Wrap a torch function for TensorFlow."""
    return polybridge.wrap(fn, src="torch", dst="tf", **options)


def value_and_gradient(fn, x):
    """Return value and gradient of the sum, from one `tf.function`."""

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return y, tape.gradient(y, x)

    return both(x)


def positive(x):
    """Return the positive entries; their number depends on the values."""
    return x[x > 0] * 2


# Functions whose result's shape depends on values.


def test_a_data_dependent_shape_asks_for_output_specs():
    with pytest.raises(polybridge.PromisedShapeError, match=r"positive.*output_specs"):
        tf.function(to_tf(positive))(X)


def test_a_data_dependent_branch_asks_for_output_specs():
    with pytest.raises(polybridge.PromisedShapeError, match="output_specs"):
        tf.function(to_tf(lambda x: x if x.sum() > 0 else -x))(X)


def test_reading_a_value_in_python_asks_for_output_specs():
    with pytest.raises(polybridge.PromisedShapeError, match="output_specs"):
        tf.function(to_tf(lambda x: x * float(x.detach().max())))(X)


def test_a_data_dependent_shape_works_with_output_specs():
    f = to_tf(positive, output_specs=TensorSpec((None,), "float32"))
    y, g = value_and_gradient(f, X)
    np.testing.assert_array_equal(y, [2, 6])
    np.testing.assert_array_equal(g, [2, 0, 2])


def test_a_data_dependent_branch_works_with_output_specs():
    f = to_tf(lambda x: x if x.sum() > 0 else -x, output_specs=TensorSpec((3,), "float32"))
    g = tf.function(lambda x: value_and_gradient(f, x)[1])
    np.testing.assert_array_equal(g(X), [1, 1, 1])
    np.testing.assert_array_equal(g(-X), [-1, -1, -1])


def test_output_specs_give_the_graph_its_shapes():
    f = tf.function(to_tf(positive, output_specs=TensorSpec((None,), "float32")))
    assert f.get_concrete_function(tf.TensorSpec([3])).structured_outputs.shape.as_list() == [None]


def test_output_specs_are_a_tree_like_the_result():
    specs = {"kept": TensorSpec((None,), "float32"), "mask": [TensorSpec((3,), "bool")]}
    f = to_tf(lambda x: {"kept": positive(x), "mask": [x > 0]}, output_specs=specs)
    out = tf.function(f)(X)
    np.testing.assert_array_equal(out["kept"], [2, 6])
    np.testing.assert_array_equal(out["mask"][0], [True, False, True])


def test_output_specs_may_have_their_dicts_in_another_order():
    spec = TensorSpec((3,), "float32")
    f = to_tf(
        lambda x: {"b": 2 * x, "a": {"d": 3 * x, "c": 5 * x}}, output_specs={"a": {"c": spec, "d": spec}, "b": spec}
    )
    for out in (f(X), tf.function(f)(X)):
        np.testing.assert_array_equal([out["b"], out["a"]["d"], out["a"]["c"]], [2 * X, 3 * X, 5 * X])
    _, gradient = value_and_gradient(tf.function(lambda x: f(x)["a"]["c"]), X)
    np.testing.assert_array_equal(gradient, [5, 5, 5])


SPEC = TensorSpec((3,), "float32")
OTHERS = {
    "names": {"a": SPEC, "c": SPEC, "n": 1},
    "containers": (SPEC, SPEC, 1),
    "depth": {"a": SPEC, "b": [SPEC], "n": 1},
    "fewer tensors": {"a": SPEC, "b": None, "n": 1},
    "values": {"a": SPEC, "b": SPEC, "n": None},
}


@pytest.mark.parametrize("name", OTHERS)
def test_output_specs_of_another_tree_are_refused(name):
    f = to_tf(lambda x: {"b": 2 * x, "a": 3 * x, "n": 1}, output_specs=OTHERS[name])
    with pytest.raises(polybridge.PromisedShapeError, match=r"'n': 1\} at the result, but .* was promised"):
        f(X)
    broken(lambda: tf.function(lambda x: tf.nest.flatten(f(x))[0])(X), "'n': 1} at the result")


def test_a_function_that_has_changed_since_can_be_traced_again():
    dtype = [torch.float32]
    f = to_tf(lambda x: x.to(dtype[0]))
    assert tf.function(lambda x: f(x))(X).dtype == tf.float32
    dtype[0] = torch.float64
    broken(lambda: tf.function(lambda x: f(x))(X), "trace it again")
    assert tf.function(lambda x: f(x))(X).dtype == tf.float64


def test_a_result_whose_dict_changes_its_order_between_calls_is_refused():
    orders = iter(["ab", "ab", "ba"])  # the trace, the first call, the second call
    f = tf.function(to_tf(lambda x: {key: x * ord(key) for key in next(orders)}))
    assert f(X)["b"][0] == X[0] * ord("b")
    broken(lambda: f(X), "{'b': *, 'a': *}", "{'a': *, 'b': *}")


def test_output_specs_change_nothing_in_eager_mode():
    np.testing.assert_array_equal(to_tf(positive, output_specs=TensorSpec((None,), "float32"))(X), [2, 6])


def test_the_user_function_is_not_run_while_tracing_with_output_specs():
    runs = []
    f = to_tf(lambda x: (runs.append(1), x)[1], output_specs=TensorSpec((3,), "float32"))
    tf.function(f).get_concrete_function(tf.TensorSpec([3]))
    assert runs == []


def test_data_dependent_functions_need_no_output_specs_in_eager_mode():
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = to_tf(positive)(X)
    np.testing.assert_array_equal(tape.gradient(y, X), [2, 0, 2])


# Promises that are broken.


def broken(call, *parts):
    """Ask that the call fails with a PromisedShapeError whose message has these parts."""
    with pytest.raises(Exception) as caught:
        call()
    assert isinstance(polybridge.last_error(), polybridge.PromisedShapeError)
    for part in ("PromisedShapeError", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("promised", "text"),
    [
        (TensorSpec((4,), "float32"), "float32[4]"),
        (TensorSpec((3, 1), "float32"), "float32[3, 1]"),
        (TensorSpec((3,), "float64"), "float64[3]"),
        (TensorSpec((3,), "int32"), "int32[3]"),
    ],
    ids=str,
)
def test_a_result_that_differs_from_its_spec_is_refused(promised, text):
    f = tf.function(to_tf(lambda x: x * 2, output_specs=promised))
    broken(lambda: f(X), "float32[3]", text, "output_specs")


def test_a_result_that_differs_while_differentiating_is_refused():
    f = to_tf(lambda x: x * 2, output_specs=TensorSpec((4,), "float32"))
    broken(lambda: value_and_gradient(f, X), "float32[3]", "float32[4]")


def test_a_leaf_that_differs_is_named_by_its_path():
    f = to_tf(
        lambda x: {"a": x, "b": x}, output_specs={"a": TensorSpec((3,), "float32"), "b": TensorSpec((2,), "float32")}
    )
    broken(lambda: tf.function(f)(X), "['b']")


def test_a_number_of_results_that_differs_is_refused():
    f = to_tf(lambda x: (x, x), output_specs=(TensorSpec((3,), "float32"),))
    broken(lambda: tf.function(f)(X), "2", "1")


def test_a_function_whose_shape_changes_between_calls_is_refused():
    sizes = iter([3, 3, 2, 2])  # the trace, the first call, the second call
    f = tf.function(to_tf(lambda x: x[: next(sizes)]))
    assert f(X).shape == (3,)
    broken(lambda: f(X), "float32[2]", "float32[3]")


def test_a_dtype_that_changes_between_calls_is_refused():
    dtypes = iter([torch.float32, torch.float32, torch.float64])
    f = tf.function(to_tf(lambda x: x.to(next(dtypes))))
    assert f(X).dtype == tf.float32
    broken(lambda: f(X), "float64[3]", "float32[3]")


# Compilers.


def test_jit_compile_is_refused_with_the_way_out():
    with pytest.raises(polybridge.CompilationError, match=r"lambda.*jit_compile=True.*jit_compile=False"):
        tf.function(to_tf(lambda x: x * 2), jit_compile=True)(X)


def test_jit_compile_is_refused_in_a_function_that_is_called_by_a_compiled_one():
    inner = tf.function(to_tf(lambda x: x * 2))
    with pytest.raises(polybridge.CompilationError, match="jit_compile=False"):
        tf.function(lambda x: inner(x) + 1, jit_compile=True)(X)


def test_a_compiled_function_beside_the_call_stays_compiled():
    f, compiled = to_tf(lambda x: x * 2), tf.function(tf.sin, jit_compile=True)
    np.testing.assert_allclose(tf.function(lambda x: f(compiled(x)))(X), 2 * np.sin(X), rtol=1e-6)


def test_run_functions_eagerly_is_eager():
    tf.config.run_functions_eagerly(True)
    try:
        _, g = value_and_gradient(to_tf(positive), X)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_array_equal(g, [2, 0, 2])


# Errors while tracing.


class Missing(Exception):
    """An exception that no message alone makes."""

    def __init__(self, name, *, where):
        super().__init__(name)
        self.where = where


@pytest.mark.parametrize("src", ["torch", "jax", "numpy"])
@pytest.mark.parametrize("autograph", [False, True])
def test_an_error_of_the_function_on_placeholders_is_its_own(src, autograph):
    """AutoGraph would make another one."""
    error = Missing("no such layer", where=3)

    def fails(x):
        raise error

    f = polybridge.wrap(fails, src=src, dst="tf")
    with pytest.raises(Missing) as caught:
        tf.function(lambda x: f(x) + 1, autograph=autograph)(X)
    assert caught.value is error
    assert polybridge.last_error() is error
    notes = "\n".join(error.__notes__)
    assert "float32[3]" in notes and "placeholders only" in notes


@pytest.mark.parametrize("src", ["torch", "tf", "numpy"])
def test_an_error_of_the_function_on_placeholders_is_its_own_in_jax(src):
    def fails(x):
        return x * undefined  # noqa: F821

    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        jax.jit(polybridge.wrap(fails, src=src, dst="jax"))(jnp.ones(3))


def test_an_operation_that_does_not_fit_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="size") as native:
        torch.ones(3) @ torch.ones(7)
    with pytest.raises(RuntimeError, match="size") as caught:
        tf.function(to_tf(lambda x: x @ torch.ones(7)))(X)
    assert type(caught.value) is type(native.value) is RuntimeError


def test_a_function_that_fails_at_ones_works_with_output_specs():
    f = polybridge.wrap(np.linalg.inv, src="numpy", dst="tf", output_specs=TensorSpec((2, 2), "float32"))
    matrix = tf.constant([[2.0, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(tf.function(f)(matrix), np.linalg.inv(matrix))
    with pytest.raises(np.linalg.LinAlgError, match="Singular") as caught:
        tf.function(polybridge.wrap(np.linalg.inv, src="numpy", dst="tf"))(matrix)
    assert "output_specs=" in caught.value.__notes__[0]


@pytest.mark.parametrize("src", ["torch", "jax"])
def test_the_end_of_a_sequence_while_tracing_does_not_end_the_training_of_keras(src):
    def stops(x):
        raise StopIteration("told")

    f = polybridge.wrap(stops, src=src, dst="tf")

    class Layer(keras.layers.Layer):
        def build(self, _):
            self.weight = self.add_weight(shape=())

        def call(self, x):
            return f(x * self.weight)

        def compute_output_shape(self, shape):
            return shape

    model = keras.Sequential([Layer()])
    model.compile("sgd", "mse", run_eagerly=False, jit_compile=False)
    with pytest.raises(RuntimeError, match="raised StopIteration: told"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.tensor(x.detach().numpy()),
        lambda x: torch.tensor(np.sin(x.detach())),
        lambda x: torch.arange(x[0]) * 1.0,
        lambda x: x * len(f"{x.sum():.2f}"),
        lambda x: x * len(x.detach().untyped_storage().tolist()),
        lambda x: polybridge.convert(polybridge.convert(x.detach(), "numpy"), "torch"),
    ],
    ids=["item", "mask", "numpy", "ufunc", "number", "format", "storage", "convert"],
)
def test_whatever_needs_values_asks_for_output_specs(read):
    with pytest.raises(polybridge.PromisedShapeError, match=r"needs values.*`output_specs=`"):
        jax.jit(polybridge.wrap(read, src="torch", dst="jax"))(jnp.ones(3))


def test_a_result_of_the_wrong_framework_is_named_while_tracing():
    with pytest.raises((polybridge.OutputError, polybridge.PromisedShapeError), match=r"result\[1\].*torch tensors"):
        tf.function(to_tf(lambda x: [x, tf.ones(1)]))(X)
