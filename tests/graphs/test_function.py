"""Asks that a wrapped torch function is native inside `tf.function`: values, arguments, results, signatures."""

import logging
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

Pair = namedtuple("Pair", "first second")


@dataclass
class Layer:
    weight: object
    bias: object


def to_tf(fn, **options):
    """Wrap a torch function for TensorFlow."""
    return polybridge.wrap(fn, src="torch", dst="tf", **options)


def gradient_in_graph(fn, *xs, **options):
    """Return `tape.gradient(fn(*xs), xs)`, computed inside one `tf.function`."""

    @tf.function
    def differentiate(*xs):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = fn(*xs)
        return tape.gradient(y, xs, **options)

    return differentiate(*xs)


# Values and dtypes.


def test_the_value_is_that_of_torch():
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)
    y = tf.function(to_tf(lambda x: torch.tanh(x)))(tf.constant(x))
    np.testing.assert_array_equal(y, torch.tanh(torch.from_numpy(x)))


def test_a_builtin_without_a_signature_can_be_traced():
    np.testing.assert_allclose(tf.function(to_tf(torch.square))(tf.constant([3.0])), [9])


def test_the_gradient_is_analytic():
    (g,) = gradient_in_graph(to_tf(lambda x: x**3), tf.constant([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(g, [3.0, 12.0, 27.0])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_a_differentiable_dtype_is_kept_forward_and_backward(name):
    x = tf.cast(tf.constant([1.0, 2.0]), name)
    f = to_tf(lambda x: x * x)
    (g,) = gradient_in_graph(f, x)
    assert tf.function(f)(x).dtype == g.dtype == x.dtype
    np.testing.assert_array_equal(tf.cast(g, "complex128"), [2, 4])


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_an_integer_dtype_passes_through(name):
    x = tf.cast(tf.constant([0, 1, 1]), name)
    y = tf.function(to_tf(lambda x: x.reshape(1, 3)))(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, [x])


def test_a_complex_gradient_follows_tensorflows_convention():
    def native(z):
        return tf.abs(tf.reduce_sum(z * z * (2 + 1j))) ** 2

    z = tf.constant([1 + 2j], tf.complex64)
    (g,) = gradient_in_graph(to_tf(lambda z: (z * z * (2 + 1j)).sum().abs() ** 2), z)
    np.testing.assert_allclose(g, gradient_in_graph(native, z)[0], rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_scalars_empty_tensors_and_unit_dimensions_keep_their_shape(shape):
    x = tf.ones(shape)
    f = to_tf(lambda x: x * 3)
    assert tf.function(f)(x).shape == shape
    np.testing.assert_array_equal(gradient_in_graph(f, x)[0], np.full(shape, 3, np.float32))


def test_a_result_of_transposed_memory_arrives_in_order():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(tf.function(to_tf(lambda x: x.T))(x), [[1, 3], [2, 4]])


def test_a_result_that_is_the_input_has_gradient_one():
    (g,) = gradient_in_graph(to_tf(lambda x: x), tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(g, [1, 1])


def test_a_function_that_writes_to_its_input_leaves_the_callers_tensor():
    x = tf.constant([1.0, 2.0])
    f = to_tf(lambda x: x.mul_(3))
    y, again = tf.function(lambda x: (f(x), x + 0))(x)
    np.testing.assert_array_equal(y, [3, 6])
    np.testing.assert_array_equal(again, [1, 2])
    np.testing.assert_array_equal(x, [1, 2])


# Arguments.


def test_keyword_arguments_carry_gradients_and_static_values():
    f = to_tf(lambda x, *, scale, power, axis=0: (x**power * scale).sum(axis))
    x, scale = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant(10.0)
    gx, gs = gradient_in_graph(lambda x, scale: f(x, scale=scale, power=2, axis=-1), x, scale)
    np.testing.assert_allclose(gx, 20 * x.numpy())
    np.testing.assert_allclose(gs, 30.0)


def test_a_static_value_that_changes_is_not_taken_from_an_earlier_trace():
    f = to_tf(lambda x, power: x**power)
    g = tf.function(lambda x, power: f(x, power))
    assert [float(g(tf.constant(3.0), power)) for power in (1, 2, 3, 2)] == [3, 9, 27, 9]


def test_strings_and_none_reach_the_function_unchanged():
    seen = []
    f = to_tf(lambda x, mode, nothing: (seen.append((mode, nothing)), x)[1])
    tf.function(lambda x: f(x, "same", None))(tf.constant(1.0))
    assert set(seen) == {("same", None)}


@pytest.mark.parametrize(
    ("make", "evaluate"),
    [
        (lambda a, b: {"a": a, "b": b}, lambda t: t["a"] * t["b"]),
        (lambda a, b: [a, (b,)], lambda t: t[0] * t[1][0]),
        (lambda a, b: Pair(a, {"x": b}), lambda t: t.first * t.second["x"]),
        (lambda a, b: Layer(a, [b]), lambda t: t.weight * t.bias[0]),
    ],
    ids=["dict", "list", "namedtuple", "dataclass"],
)
def test_a_tree_of_arguments_carries_gradients(make, evaluate):
    f = to_tf(evaluate)
    ga, gb = gradient_in_graph(lambda a, b: f(make(a, b)), tf.constant([2.0]), tf.constant([5.0]))
    assert (float(ga[0]), float(gb[0])) == (5, 2)


def test_a_result_keeps_its_structure_and_its_static_leaves():
    found = []
    f = to_tf(lambda x: {"a": Layer(x, None), "b": [Pair(x * 2, "text"), 7]})
    tf.function(lambda x: found.append(f(x)))(tf.constant([3.0]))
    match found[0]:
        case {"a": Layer(weight=tf.Tensor(), bias=None), "b": [Pair(tf.Tensor(), "text"), 7]}:
            return
    pytest.fail(f"unexpected structure {found[0]}")


def test_a_namedtuple_comes_out_of_a_tf_function_with_its_gradient():
    f = to_tf(lambda x: Pair(x * 2, {"square": x * x}))
    out = tf.function(f)(tf.constant([3.0]))
    assert type(out) is Pair
    (g,) = gradient_in_graph(lambda x: f(x).second["square"], tf.constant([3.0]))
    np.testing.assert_array_equal(g, [6])


def test_the_same_tensor_twice_gets_the_sum_of_both_gradients():
    (g,) = gradient_in_graph(lambda x: to_tf(lambda a, b: a * a * b)(x, x), tf.constant([2.0]))
    np.testing.assert_array_equal(g, [12])


def test_an_integer_input_beside_floats_gets_none():
    f = to_tf(lambda w, i: w[i])
    gw, gi = gradient_in_graph(f, tf.constant([1.0, 2.0, 3.0]), tf.constant([0, 0, 2]))
    np.testing.assert_array_equal(gw, [2, 0, 1])
    assert gi is None


def test_a_numpy_argument_is_a_constant():
    f = to_tf(lambda x, c: x * c)
    (g,) = gradient_in_graph(lambda x: f(x, np.array([5.0, 7.0], "f4")), tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(g, [5, 7])


def test_a_captured_eager_tensor_gets_its_gradient():
    f = to_tf(lambda x, c: x * c)
    captured = tf.constant([5.0])
    with tf.GradientTape() as tape:
        tape.watch(captured)
        y = tf.function(lambda x: f(x, captured))(tf.constant([2.0]))
    np.testing.assert_array_equal(tape.gradient(y, captured), [2])


def test_a_function_without_arguments_is_evaluated_at_every_call():
    calls = []
    f = tf.function(to_tf(lambda: torch.full((2,), float(len(calls) + (calls.append(1) or 0)))))
    first, second = f(), f()
    assert float(second[0]) > float(first[0])


def test_a_tensor_of_the_wrong_framework_is_named_with_its_path():
    with pytest.raises(polybridge.WrongFrameworkError, match=r"args\[1\].*polybridge\.convert"):
        tf.function(lambda x: to_tf(torch.add)(x, torch.ones(1)))(tf.ones(1))


def test_a_string_tensor_is_refused_with_its_path():
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\].*string"):
        tf.function(to_tf(lambda x: x))(tf.constant("text"))


@pytest.mark.parametrize("how", ["argument", "default"])
def test_a_wrapped_function_as_argument_of_a_tf_function_stays_wrapped(how):
    """TensorFlow's trace types follow `__wrapped__`."""
    seen = []
    f = to_tf(lambda x: (seen.append(type(x)), x * 2)[1])

    def apply(x, fn=f):
        return fn(x)

    applied = tf.function(apply)
    y = applied(tf.ones(1), f) if how == "argument" else applied(tf.ones(1))
    assert y.numpy() == [2] and all(issubclass(kind, torch.Tensor) for kind in seen)


# Variables.


def test_a_variable_as_input_gets_its_gradient():
    v, f = tf.Variable([3.0]), to_tf(lambda x: x**2)

    @tf.function
    def differentiate():
        with tf.GradientTape() as tape:
            y = f(v)
        return tape.gradient(y, v)

    np.testing.assert_array_equal(differentiate(), [6])


def test_a_variable_used_natively_before_the_call_gets_its_gradient():
    v, f = tf.Variable([3.0]), to_tf(lambda x: x**2)

    @tf.function
    def differentiate(x):
        with tf.GradientTape() as tape:
            y = f(v * x) * v
        return tape.gradient(y, v)

    np.testing.assert_array_equal(differentiate(tf.constant([2.0])), [3 * 4 * 9])


def test_a_variable_that_was_assigned_is_read_anew():
    v = tf.Variable([3.0])
    f = tf.function(lambda: to_tf(lambda x: x**2)(v))
    first = f()
    v.assign([5.0])
    np.testing.assert_array_equal([first, f()], [[9], [25]])


def test_a_training_step_is_that_of_native_tensorflow():
    def trained(fn):
        v = tf.Variable([1.0, -2.0])

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(fn(v) ** 2)
            v.assign_sub(0.1 * tape.gradient(loss, v))

        for _ in range(5):
            step()
        return v.numpy()

    np.testing.assert_allclose(trained(to_tf(lambda x: x.sin())), trained(tf.sin), rtol=1e-6)


# Results.


def test_integer_results_stand_beside_differentiable_ones():
    f = to_tf(lambda x: x.max(0))
    values, positions = tf.function(f)(tf.constant([1.0, 4.0, 2.0]))
    assert (float(values), int(positions), positions.dtype) == (4, 1, tf.int64)
    (g,) = gradient_in_graph(lambda x: f(x).values, tf.constant([1.0, 4.0, 2.0]))
    np.testing.assert_array_equal(g, [0, 1, 0])


def test_an_integer_result_has_no_gradient():
    assert gradient_in_graph(lambda x: to_tf(torch.argmax)(x), tf.constant([1.0, 4.0])) == (None,)


def test_the_gradient_of_one_of_two_results_ignores_the_other():
    f = to_tf(lambda a, b: (a * b, b.sin()))
    ga, gb = gradient_in_graph(lambda a, b: f(a, b)[0], tf.constant([2.0]), tf.constant([3.0]))
    assert (float(ga[0]), float(gb[0])) == (3, 2)


@pytest.mark.parametrize("option", ["none", "zero"])
def test_an_unused_input_gets_what_tensorflow_gives(option):
    def both(a, b):
        return a * 2

    xs = tf.constant([1.0]), tf.constant([1.0])
    ga, gb = gradient_in_graph(to_tf(both), *xs, unconnected_gradients=option)
    _, native = gradient_in_graph(both, *xs, unconnected_gradients=option)
    assert float(ga[0]) == 2
    assert gb is native if native is None else np.array_equal(gb, native)


def test_a_result_that_depends_on_no_input_has_no_gradient():
    assert gradient_in_graph(to_tf(lambda x: torch.ones(2)), tf.constant([1.0])) == (None,)


def test_an_unused_input_reached_by_a_second_result_gets_its_gradient():
    f = to_tf(lambda a, b: (a * 2, b * 3))
    _, gb = gradient_in_graph(lambda a, b: f(a, b)[1], tf.constant([1.0]), tf.constant([1.0]))
    np.testing.assert_array_equal(gb, [3])


# Signatures.


def test_an_unknown_dimension_stays_unknown_and_serves_every_size():
    f = tf.function(to_tf(lambda x: x * 2), input_signature=[tf.TensorSpec([None, 3])])
    assert f.get_concrete_function().structured_outputs.shape.as_list() == [None, 3]
    assert [f(tf.ones([n, 3])).shape[0] for n in (1, 5, 0, 16)] == [1, 5, 0, 16]


def test_a_dimension_that_the_function_reduces_is_known():
    f = tf.function(to_tf(lambda x: x.sum(0)), input_signature=[tf.TensorSpec([None, 3])])
    assert f.get_concrete_function().structured_outputs.shape.as_list() == [3]


def test_the_gradient_of_an_unknown_dimension_is_right_for_every_size():
    f = to_tf(lambda x: (x**2).mean(0))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def differentiate(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    for n in (1, 4, 7):
        np.testing.assert_allclose(differentiate(tf.ones([n, 2])), np.full([n, 2], 2 / n), rtol=1e-6)


def test_two_unknown_dimensions_are_told_apart():
    f = tf.function(to_tf(lambda a, b: a @ b), input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([3, None])])
    assert f(tf.ones([2, 3]), tf.ones([3, 5])).shape == (2, 5)


def test_two_inputs_that_share_an_unknown_dimension():
    spec = tf.TensorSpec([None])
    f = tf.function(to_tf(lambda a, b: torch.cat([a * b, a])), input_signature=[spec, spec])
    assert f(tf.ones(3), tf.ones(3)).shape == (6,)


def test_an_unknown_rank_gives_the_value_or_asks_for_output_specs():
    f = tf.function(to_tf(lambda x: x * 2), input_signature=[tf.TensorSpec(None)])
    try:
        y = f(tf.ones([2, 3]))
    except polybridge.PromisedShapeError as error:
        assert "output_specs" in str(error)
    else:
        np.testing.assert_array_equal(y, np.full([2, 3], 2))


def test_an_unknown_rank_works_with_output_specs():
    f = to_tf(lambda x: x * 2, output_specs=polybridge.TensorSpec(None, "float32"))

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def differentiate(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    np.testing.assert_array_equal(differentiate(tf.ones([2, 3])), np.full([2, 3], 2))
    np.testing.assert_array_equal(differentiate(tf.ones([4])), np.full([4], 2))


def test_several_signatures_live_beside_each_other():
    f = tf.function(to_tf(lambda x: x * 2))
    xs = [tf.ones([2]), tf.ones([3]), tf.ones([2, 2]), tf.ones([2], tf.float64), tf.ones([2], tf.int32)]
    for x in [*xs, *xs]:
        y = f(x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)


def test_a_relaxed_signature_is_served():
    f = tf.function(to_tf(lambda x: x.cumsum(0)), reduce_retracing=True)
    for n in (2, 3, 4, 5):
        np.testing.assert_array_equal(f(tf.ones([n])), np.arange(1, n + 1))


# Composition.


def test_one_wrapped_function_may_be_called_twice_in_a_graph():
    f = to_tf(lambda x: x**2)
    (g,) = gradient_in_graph(lambda x: f(f(x)) + f(x), tf.constant([3.0]))
    np.testing.assert_array_equal(g, [4 * 27 + 6])


def test_a_nested_tf_function_is_inlined_with_its_gradient():
    inner = tf.function(to_tf(lambda x: x**3))
    (g,) = gradient_in_graph(lambda x: inner(x) * x, tf.constant([2.0]))
    np.testing.assert_array_equal(g, [32])


def test_stop_gradient_cuts_the_call():
    (g,) = gradient_in_graph(lambda x: to_tf(torch.square)(tf.stop_gradient(x)) * x, tf.constant([3.0]))
    np.testing.assert_array_equal(g, [9])


def test_autograph_says_nothing():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    tf.get_logger().addHandler(handler)
    try:
        f = to_tf(lambda x: x if x.sum() > 0 else -x, output_specs=polybridge.TensorSpec((1,), "float32"))
        tf.function(f)(tf.constant([1.0]))
        tf.function(lambda x: f(x) + f(x))(tf.constant([1.0]))
    finally:
        tf.get_logger().removeHandler(handler)
    assert [record.getMessage() for record in records] == []
