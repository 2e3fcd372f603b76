"""Asks for every kind of derivative that TensorFlow has, of a wrapped torch function, inside and outside of graphs."""

import math

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

FIFTH = polybridge.wrap(lambda x: x**5, src="torch", dst="tf")
CUBE = polybridge.wrap(lambda x: x**3, src="torch", dst="tf")
X = tf.constant([2.0, 3.0])


def derivative(fn, order):
    """Return the derivative of an elementwise function, by nested tapes."""
    if order == 0:
        return fn

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = derivative(fn, order - 1)(x)
        return tape.gradient(y, x)

    return differentiated


def of_fifth(order):
    """Return the derivative of x**5 at X."""
    return math.perm(5, order) * X.numpy() ** (5 - order)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_nested_tapes_inside_one_tf_function(order):
    np.testing.assert_allclose(tf.function(derivative(FIFTH, order))(X), of_fifth(order), rtol=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_nested_tapes_around_a_tf_function(order):
    np.testing.assert_allclose(derivative(tf.function(FIFTH), order)(X), of_fifth(order), rtol=1e-5)


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (1, 2), (2, 1)])
def test_some_tapes_inside_and_some_around(inner, outer):
    found = derivative(tf.function(derivative(FIFTH, inner)), outer)(X)
    np.testing.assert_allclose(found, of_fifth(inner + outer), rtol=1e-5)


def test_every_order_from_one_graph():
    @tf.function
    def orders(x):
        with tf.GradientTape() as c:
            c.watch(x)
            with tf.GradientTape() as b:
                b.watch(x)
                with tf.GradientTape() as a:
                    a.watch(x)
                    y = FIFTH(x)
                first = a.gradient(y, x)
            second = b.gradient(first, x)
        return y, first, second, c.gradient(second, x)

    for order, found in enumerate(orders(X)):
        np.testing.assert_allclose(found, of_fifth(order), rtol=1e-5)


def test_a_derivative_of_a_mixed_expression():
    """The second derivative of x**3 * x is 12 x**2, and needs the path through the primals of the pullback."""
    found = tf.function(derivative(lambda x: CUBE(x) * x, 2))(X)
    np.testing.assert_allclose(found, 12 * X.numpy() ** 2, rtol=1e-5)


def test_a_mixed_second_derivative_of_two_inputs():
    f = polybridge.wrap(lambda a, b: a**2 * b**3, src="torch", dst="tf")

    @tf.function
    def mixed(a, b):
        with tf.GradientTape() as outer:
            outer.watch(b)
            with tf.GradientTape() as inner:
                inner.watch(a)
                y = f(a, b)
            g = inner.gradient(y, a)
        return outer.gradient(g, b)

    np.testing.assert_allclose(mixed(tf.constant([2.0]), tf.constant([3.0])), [2 * 2 * 3 * 9])


def test_a_second_derivative_that_is_zero_everywhere_is_none_as_natively():
    f = polybridge.wrap(lambda x: x * 3, src="torch", dst="tf")
    assert derivative(f, 2)(X) is None
    assert tf.function(derivative(f, 2))(X) is None


def test_a_gradient_with_respect_to_the_upstream_gradient():
    """The pullback is linear in the cotangent: d/dct (ct * 3 x**2) = 3 x**2."""

    @tf.function
    def transposed(x, ct):
        with tf.GradientTape() as outer:
            outer.watch(ct)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = CUBE(x)
            g = inner.gradient(y, x, output_gradients=ct)
        return outer.gradient(g, ct)

    np.testing.assert_allclose(transposed(X, tf.ones(2)), 3 * X.numpy() ** 2)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_persistent_tape_differentiates_twice(mode):
    def twice(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = CUBE(x)
            z = y * y
        return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(y, x)

    first, squared, again = (tf.function(twice) if mode == "graph" else twice)(X)
    np.testing.assert_allclose(first, 3 * X.numpy() ** 2)
    np.testing.assert_allclose(squared, 6 * X.numpy() ** 5)
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("pfor", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph", "around"])
def test_a_jacobian(mode, pfor):
    fn = tf.function(CUBE) if mode == "around" else CUBE

    def jacobian(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = fn(x)
        return tape.jacobian(y, x, experimental_use_pfor=pfor)

    found = (tf.function(jacobian) if mode == "graph" else jacobian)(X)
    np.testing.assert_allclose(found, np.diag(3 * X.numpy() ** 2))


@pytest.mark.parametrize("pfor", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_batch_jacobian(mode, pfor):
    f = polybridge.wrap(lambda x: torch.stack([x[:, 0] * x[:, 1], x[:, 0]], 1), src="torch", dst="tf")

    def jacobian(x):
        with tf.GradientTape(persistent=True) as tape:  # TensorFlow asks for it without pfor
            tape.watch(x)
            y = f(x)
        return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)

    found = (tf.function(jacobian) if mode == "graph" else jacobian)(tf.constant([[2.0, 3.0], [4.0, 5.0]]))
    np.testing.assert_allclose(found, [[[3, 2], [1, 0]], [[5, 4], [1, 0]]])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_jacobian_of_a_gradient_is_the_hessian(mode):
    f = polybridge.wrap(lambda x: x[0] ** 2 * x[1], src="torch", dst="tf")

    def hessian(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            g = inner.gradient(y, x)
        return outer.jacobian(g, x)

    found = (tf.function(hessian) if mode == "graph" else hessian)(X)
    np.testing.assert_allclose(found, [[6, 4], [4, 0]])


@pytest.mark.parametrize("mode", ["eager", "graph", "around"])
def test_a_forward_accumulator(mode):
    fn = tf.function(CUBE) if mode == "around" else CUBE

    def pushed(x, tangent):
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            y = fn(x)
        return accumulator.jvp(y)

    found = (tf.function(pushed) if mode == "graph" else pushed)(X, tf.constant([1.0, 10.0]))
    np.testing.assert_allclose(found, [12, 270])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_forward_over_reverse_is_a_hessian_vector_product(mode):
    def product(x, vector):
        with tf.autodiff.ForwardAccumulator(x, vector) as accumulator, tf.GradientTape() as tape:
            tape.watch(x)
            y = CUBE(x)
            g = tape.gradient(y, x)
        return accumulator.jvp(g)

    found = (tf.function(product) if mode == "graph" else product)(X, tf.constant([1.0, 10.0]))
    np.testing.assert_allclose(found, [12, 180])


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_of_several_results_and_inputs_are_those_of_tensorflow(order):
    def ours(a, b):
        return torch.sin(a) * b, (a * b).cumsum(0)

    def native(a, b):
        return tf.sin(a) * b, tf.cumsum(a * b)

    def loss(fn):
        return lambda x: tf.add_n([tf.reduce_sum(y**2) for y in fn(x, tf.reverse(x, [0]))])

    x = tf.constant([0.5, 1.0, 2.0])
    found = tf.function(derivative(loss(polybridge.wrap(ours, src="torch", dst="tf")), order))(x)
    np.testing.assert_allclose(found, tf.function(derivative(loss(native), order))(x), rtol=1e-4)


def test_tf_gradients_inside_a_tf_function():
    g = tf.function(lambda x: tf.gradients(CUBE(x), x)[0])(X)
    np.testing.assert_allclose(g, 3 * X.numpy() ** 2)


def test_a_custom_gradient_around_the_call():
    @tf.custom_gradient
    def clipped(x):
        return CUBE(x), lambda ct: ct * 0.5

    np.testing.assert_array_equal(tf.function(derivative(clipped, 1))(X), [0.5, 0.5])
