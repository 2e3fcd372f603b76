"""Asks that a wrapped torch function lives in a TensorFlow 1 graph: sessions, placeholders, `tf.gradients`."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

v1 = tf.compat.v1


@pytest.fixture
def session():
    """Return an open session of a fresh default graph."""
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def to_tf(fn, **options):
    """Wrap a torch function for TensorFlow."""
    return polybridge.wrap(fn, src="torch", dst="tf", **options)


def test_a_value_is_fed_and_fetched(session):
    x = v1.placeholder(tf.float32, [2])
    y = to_tf(lambda x: x**2)(x)
    np.testing.assert_array_equal(session.run(y, {x: [3, 4]}), [9, 16])


def test_the_gradient_is_analytic(session):
    a, b = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    y = to_tf(lambda a, b: 3 * a + 4 * b * b)(a, b)
    found = session.run([y, *tf.gradients(y, [a, b])], {a: 1, b: 3})
    assert found == [39, 3, 24]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_higher_orders(session, order):
    x = v1.placeholder(tf.float32, [2])
    y = to_tf(lambda x: x**4)(x)
    for _ in range(order):
        (y,) = tf.gradients(y, x)
    expected = [4 * 2.0**3, 12 * 2.0**2, 24 * 2.0][order - 1]
    np.testing.assert_allclose(session.run(y, {x: [2, 2]}), [expected] * 2)


def test_a_second_derivative_through_native_operations(session):
    """The second derivative of sin(x)**3 is 6 sin cos**2 - 3 sin**3."""
    x = v1.placeholder(tf.float64, [3])
    y = to_tf(lambda s: s**3)(tf.sin(x))
    (g,) = tf.gradients(y, x)
    (h,) = tf.gradients(g, x)
    v = np.array([0.3, 1.0, 2.0])
    s, c = np.sin(v), np.cos(v)
    np.testing.assert_allclose(session.run(h, {x: v}), 6 * s * c**2 - 3 * s**3)


def test_one_graph_serves_every_batch_size(session):
    x = v1.placeholder(tf.float32, [None, 2])
    y = to_tf(lambda x: (x**2).mean(0))(x)
    (g,) = tf.gradients(y, x)
    assert y.shape.as_list() == [2]
    for n in (1, 3, 8):
        np.testing.assert_allclose(session.run(g, {x: np.ones([n, 2])}), np.full([n, 2], 2 / n), rtol=1e-6)


def test_several_results_share_one_run(session):
    runs = []
    f = to_tf(lambda x: (runs.append(1), {"double": x * 2, "parts": (x + 1, x.argmax())})[1])
    x = v1.placeholder(tf.float32, [3])
    out = f(x)
    runs.clear()
    double, plus, position = session.run([out["double"], *out["parts"]], {x: [1, 5, 2]})
    np.testing.assert_array_equal(double, [2, 10, 4])
    np.testing.assert_array_equal(plus, [2, 6, 3])
    assert position == 1 and len(runs) == 1


def test_the_gradient_of_several_results_is_their_sum(session):
    x = v1.placeholder(tf.float32, [])
    a, b = to_tf(lambda x: (x**2, x**3))(x)
    assert session.run(tf.gradients([a, b], x), {x: 2}) == [2 * 2 + 3 * 4]


@pytest.mark.parametrize("option", ["none", "zero"])
def test_an_unused_input_gets_what_tensorflow_gives(session, option):
    a, b = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    y = to_tf(lambda a, b: a * 2)(a, b)
    native = tf.gradients(a * 2, [a, b], unconnected_gradients=option)
    ga, gb = tf.gradients(y, [a, b], unconnected_gradients=option)
    assert session.run(ga, {a: 1, b: 1}) == 2
    assert (gb is None) == (native[1] is None)
    if gb is not None:
        assert session.run(gb, {a: 1, b: 1}) == 0


def test_an_integer_input_gets_none(session):
    w, i = v1.placeholder(tf.float32, [3]), v1.placeholder(tf.int64, [2])
    gw, gi = tf.gradients(to_tf(lambda w, i: w[i])(w, i), [w, i])
    np.testing.assert_array_equal(session.run(gw, {w: [1, 2, 3], i: [0, 2]}), [1, 0, 1])
    assert gi is None


def test_weighted_by_grad_ys(session):
    x = v1.placeholder(tf.float32, [2])
    (g,) = tf.gradients(to_tf(lambda x: x**2)(x), x, grad_ys=tf.constant([1.0, 10.0]))
    np.testing.assert_array_equal(session.run(g, {x: [1, 2]}), [2, 40])


def test_fetching_the_value_alone_leaves_no_residual(session):
    from polybridge.core import residuals

    x = v1.placeholder(tf.float32, [2])
    y = to_tf(lambda x: x**2)(x)
    tf.gradients(y, x)
    before = len(residuals._residuals)
    for _ in range(5):
        session.run(y, {x: [3, 4]})
    assert len(residuals._residuals) == before


@pytest.mark.parametrize("resource", [True, False])
def test_a_variable_is_trained_by_an_optimizer(session, resource):
    with v1.variable_scope("scope", use_resource=resource):
        w = v1.get_variable("w", initializer=tf.constant([5.0, -3.0]))
    loss = tf.reduce_sum(to_tf(lambda w: w**2)(w))
    step = v1.train.GradientDescentOptimizer(0.25).minimize(loss)
    session.run(v1.global_variables_initializer())
    session.run(step)
    np.testing.assert_allclose(session.run(w), [2.5, -1.5])


def test_the_function_runs_once_for_value_and_gradient(session):
    runs = []
    x = v1.placeholder(tf.float32, [2])
    y = to_tf(lambda x: (runs.append(1), x**3)[1])(x)
    (g,) = tf.gradients(y, x)
    (h,) = tf.gradients(g, x)
    runs.clear()
    session.run([y, g, h], {x: [1, 2]})
    assert len(runs) == 1


def test_the_dropout_mask_of_the_value_is_that_of_the_gradient(session):
    x = v1.placeholder(tf.float32, [1000])
    y = to_tf(lambda x: torch.nn.functional.dropout(x, 0.5))(x)
    value, g = session.run([y, *tf.gradients(y, x)], {x: np.ones(1000)})
    np.testing.assert_array_equal(value, g)
    assert 300 < np.count_nonzero(value) < 700


def test_a_while_loop_of_tensorflow_1(session):
    x = v1.placeholder(tf.float32, [2])
    f = to_tf(lambda x: x * x)
    y = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, f(x)), [0, x])[1]
    (g,) = tf.gradients(y, x)
    np.testing.assert_allclose(session.run(g, {x: [1, 2]}), [4, 32])


def test_a_cond_of_tensorflow_1(session):
    x, flag = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.bool, [])
    f = to_tf(lambda x: x * x)
    (g,) = tf.gradients(tf.cond(flag, lambda: f(x), lambda: x * 5.0), x)
    np.testing.assert_array_equal(session.run(g, {x: [1, 2], flag: True}), [2, 4])
    np.testing.assert_array_equal(session.run(g, {x: [1, 2], flag: False}), [5, 5])


def test_an_unknown_shape_is_served(session):
    x = v1.placeholder(tf.float32)
    y = to_tf(lambda x: x * 2)(x)
    (g,) = tf.gradients(y, x)
    assert session.run(y, {x: [[1, 2]]}).shape == (1, 2)
    np.testing.assert_array_equal(session.run(g, {x: [1, 2, 3]}), [2, 2, 2])


def test_one_wrapped_function_serves_several_graphs():
    f = to_tf(lambda x: x**2)
    for value in (2.0, 3.0):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [])
            assert session.run(tf.gradients(f(x), x), {x: value}) == [2 * value]
    assert f(tf.constant(3.0)).numpy() == 9


def test_an_error_of_the_function_reaches_the_session(session):
    class OwnError(Exception):
        code = 42

    def fails(x):
        raise OwnError("torch said no")

    x = v1.placeholder(tf.float32, [])
    y = to_tf(fails, output_specs=polybridge.TensorSpec((), "float32"))(x)
    with pytest.raises(tf.errors.OpError, match=r"OwnError[\s\S]*torch said no"):
        session.run(y, {x: 1})
    assert polybridge.last_error().code == 42
