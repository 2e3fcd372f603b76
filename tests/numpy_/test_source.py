"""Asks that a NumPy function is a function of every framework, and is differentiated as its caller says."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.pairs.dialects import assert_identical, dialect

X = [0.5, 1.5]


def wave(x):
    return np.sin(x) * x


def wave_slope(x):
    return np.cos(x) * x + np.sin(x)


RULE = (lambda x: (wave(x), x), lambda x, ct: (ct * wave_slope(x),))
WAYS = {"rule": (RULE, 1e-15), "finite-difference": ("finite-difference", 1e-9)}
ways = pytest.mark.parametrize("vjp, rtol", WAYS.values(), ids=WAYS)


def in_other(other, fn, **options):
    return polybridge.wrap(fn, src="numpy", dst=other.name, **options)


def in_tf(fn, **options):
    return in_other(dialect("tensorflow"), fn, **options)


def tape_gradient(fn, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    return tape.gradient(y, x)


def test_values(other):
    assert_identical(other.numpy(in_other(other, wave)(other.tensor(X, "float64"))), wave(np.array(X)))


def test_numpy_scalars_are_tensors(other):
    y = in_other(other, np.sum)(other.tensor(X, "float64"))
    assert other.is_tensor(y)
    assert_identical(other.numpy(y), np.array(2.0))


@ways
def test_the_gradient(other, vjp, rtol):
    gradient = other.gradient(in_other(other, wave, vjp=vjp), other.tensor(X, "float64"))
    np.testing.assert_allclose(gradient, wave_slope(np.array(X)), rtol=rtol)


@ways
def test_the_gradient_goes_through_native_operations_around_the_call(other, vjp, rtol):
    f = in_other(other, wave, vjp=vjp)
    gradient, x = other.gradient(lambda x: other.sin(f(x * 3)), other.tensor(X, "float64")), np.array(X)
    np.testing.assert_allclose(gradient, 3 * np.cos(wave(3 * x)) * wave_slope(3 * x), rtol=rtol)


# Without a rule.


def test_a_forward_alone_needs_no_rule(other):
    x = other.parameter(np.array(X))
    assert_identical(other.numpy(in_other(other, wave)(x)), wave(np.array(X)))


def test_differentiating_without_a_rule_says_the_two_ways(other):
    with pytest.raises(polybridge.NotDifferentiableError, match=r'`vjp=\(fwd, bwd\)`.*`vjp="finite-difference"`'):
        other.gradient(in_other(other, wave), other.tensor(X))


def test_a_call_under_a_tape_that_is_not_asked_needs_no_rule(other):
    f = in_other(other, wave)
    gradient = other.gradient(lambda x: x * 2 + other.stop_gradient(f(x)), other.tensor(X, "float64"))
    assert gradient.tolist() == [2.0, 2.0]


def test_a_function_traced_into_a_graph_needs_no_rule():
    np.testing.assert_array_equal(tf.function(in_tf(wave))(tf.constant(X)), wave(np.array(X, "float32")))


def test_a_gradient_in_a_graph_without_a_rule_says_the_two_ways():
    traced = tf.function(lambda x: tape_gradient(in_tf(wave), x), autograph=False)
    with pytest.raises(polybridge.NotDifferentiableError, match='`vjp="finite-difference"`'):
        traced(tf.constant(X))


def test_a_gradient_in_a_tf1_graph_without_a_rule_says_the_two_ways():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float64, [2])
        y = in_tf(wave)(x)
        with pytest.raises(polybridge.NotDifferentiableError, match='`vjp="finite-difference"`'):
            tf.gradients(y, x)


def test_a_function_inside_a_traced_torch_function_needs_no_rule():
    inner = in_other(dialect("torch"), wave)
    f = polybridge.wrap(lambda x: inner(x) * 2, src="torch", dst="tensorflow")
    np.testing.assert_allclose(tf.function(f)(tf.constant(X)), 2 * wave(np.array(X, "float32")))


# TensorFlow's graphs.


@ways
@pytest.mark.parametrize("shape", [[2], [None], None], ids=str)
def test_the_gradient_inside_a_tf_function(vjp, rtol, shape):
    f = in_tf(wave, vjp=vjp)
    traced = tf.function(lambda x: tape_gradient(f, x), input_signature=[tf.TensorSpec(shape, tf.float64)])
    np.testing.assert_allclose(traced(tf.constant(X, tf.float64)), wave_slope(np.array(X)), rtol=rtol)


@ways
def test_the_gradient_in_a_tf1_graph(vjp, rtol):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float64, [None])
        y = in_tf(wave, vjp=vjp)(x)
        found = session.run([y, *tf.gradients(y, x)], {x: X})
    np.testing.assert_allclose(found, [wave(np.array(X)), wave_slope(np.array(X))], rtol=rtol)


def test_tracing_finite_differences_costs_one_run():
    calls = []
    f = in_tf(lambda x: calls.append(1) or wave(x), vjp="finite-difference")
    tf.function(lambda x: tape_gradient(f, x), autograph=False).get_concrete_function(tf.TensorSpec([100], tf.float64))
    assert len(calls) == 1


# Second order.


def test_the_second_derivative_of_finite_differences(other):
    f = in_other(other, wave, vjp="finite-difference")
    second = other.derivative(other.derivative(f))(other.tensor(X, "float64"))
    x = np.array(X)
    np.testing.assert_allclose(other.numpy(second), 2 * np.cos(x) - x * np.sin(x), rtol=1e-6)


def test_the_second_derivative_of_finite_differences_in_a_tf_function():
    derivative = dialect("tensorflow").derivative
    f, x = in_tf(wave, vjp="finite-difference"), np.array(X)
    second = tf.function(derivative(derivative(f)), autograph=False)(tf.constant(X, tf.float64))
    np.testing.assert_allclose(second, 2 * np.cos(x) - x * np.sin(x), rtol=1e-6)


def test_torch_checks_both_orders_of_finite_differences():
    f = in_other(dialect("torch"), lambda x, w: (x @ w, np.sin(x).sum()), vjp="finite-difference")
    x, w = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in ([[0.3, 1.2]], [[0.5], [2.0]]))
    assert torch.autograd.gradcheck(f, [x, w])
    assert torch.autograd.gradgradcheck(f, [x, w], eps=1e-4, atol=1e-4)


def test_the_second_derivative_of_a_numpy_rule_is_refused(other):
    f = in_other(other, wave, vjp=RULE)
    with pytest.raises(polybridge.NotDifferentiableError, match=r"differentiated twice.*finite-difference"):
        other.derivative(other.derivative(f))(other.tensor(X, "float64"))


def test_the_third_derivative_of_finite_differences_is_refused(other):
    f = in_other(other, wave, vjp="finite-difference")
    with pytest.raises(polybridge.NotDifferentiableError, match="three times by finite differences"):
        other.derivative(other.derivative(other.derivative(f)))(other.tensor(X, "float64"))
