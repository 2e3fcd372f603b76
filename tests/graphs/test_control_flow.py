"""Asks that a wrapped torch function works and differentiates inside every TensorFlow construct that holds a graph."""

import numpy as np
import pytest
import tensorflow as tf

import polybridge

SQUARE = polybridge.wrap(lambda x: x * x, src="torch", dst="tf")
X = tf.constant([1.0, 2.0, 3.0])


def in_graph(fn, x=X):
    """Return the value and the gradient of the sum of `fn(x)`, from one `tf.function`."""

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return y, tape.gradient(y, x)

    return both(x)


def test_while_loop():
    """Two squarings are x**4."""
    y, g = in_graph(lambda x: tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, SQUARE(x)), [0, x])[1])
    np.testing.assert_array_equal(y, X**4)
    np.testing.assert_allclose(g, 4 * X**3)


def test_while_loop_of_a_length_that_only_the_run_knows():
    @tf.function
    def both(x, n):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, SQUARE(x)), [0, x])[1]
        return tape.gradient(y, x)

    for n in (0, 1, 3):
        power = 2**n
        np.testing.assert_allclose(both(X, tf.constant(n)), power * X ** (power - 1), rtol=1e-5)


def test_while_loop_differentiated_twice():
    def looped(x):
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, SQUARE(x)), [0, x])[1]

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = looped(x)
            g = inner.gradient(y, x)
        return outer.gradient(g, x)

    np.testing.assert_allclose(second(X), 12 * X**2)


def test_while_loop_with_a_gradient_inside():
    """Newton's method for the root of x**2 - 2, with the derivative from torch."""

    def step(i, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = SQUARE(x) - 2.0
        return i + 1, x - y / tape.gradient(y, x)

    root = tf.function(lambda x: tf.while_loop(lambda i, x: i < 6, step, [0, x])[1])(tf.constant([1.0]))
    np.testing.assert_allclose(root, [np.sqrt(2)], rtol=1e-6)


def test_autograph_for_and_if():
    @tf.function
    def both(x, n):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for i in tf.range(n):
                if i % 2 == 0:  # noqa: SIM108  (AutoGraph is to see a statement)
                    y = SQUARE(y)
                else:
                    y = y * 3.0
        return y, tape.gradient(y, x)

    y, g = both(X, tf.constant(3))
    np.testing.assert_allclose(y, 9 * X**4)
    np.testing.assert_allclose(g, 36 * X**3)


@pytest.mark.parametrize("flag", [True, False])
def test_cond_takes_the_gradient_of_the_branch_that_ran(flag):
    @tf.function
    def both(x, flag):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(flag, lambda: SQUARE(x), lambda: x * 5.0)
        return y, tape.gradient(y, x)

    y, g = both(X, tf.constant(flag))
    np.testing.assert_array_equal(y, X**2 if flag else X * 5)
    np.testing.assert_array_equal(g, 2 * X if flag else [5, 5, 5])


def test_cond_runs_the_function_in_its_own_branch_only():
    runs = []
    f = polybridge.wrap(lambda x: (runs.append(1), x)[1], src="torch", dst="tf")
    g = tf.function(lambda x, flag: tf.cond(flag, lambda: f(x), lambda: x))
    g(X, tf.constant(True))
    runs.clear()
    g(X, tf.constant(False))
    assert runs == []


@pytest.mark.parametrize("parallel", [1, 4])
def test_map_fn(parallel):
    y, g = in_graph(lambda x: tf.map_fn(SQUARE, x, parallel_iterations=parallel))
    np.testing.assert_array_equal(y, X**2)
    np.testing.assert_array_equal(g, 2 * X)


def test_map_fn_in_eager_mode():
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.map_fn(SQUARE, X)
    np.testing.assert_array_equal(tape.gradient(y, X), 2 * X)


def test_scan():
    """The running sums of squares: y_n = y_{n-1} + x_n**2."""
    y, g = in_graph(lambda x: tf.scan(lambda total, x: total + SQUARE(x), x, initializer=tf.constant(0.0)))
    np.testing.assert_array_equal(y, [1, 5, 14])
    np.testing.assert_array_equal(g, [6, 8, 6])


def test_foldl():
    y, g = in_graph(lambda x: tf.foldl(lambda total, x: SQUARE(total) + x, x, initializer=tf.constant(1.0)))
    np.testing.assert_array_equal(y, (2.0**2 + 2) ** 2 + 3)
    np.testing.assert_array_equal(g, [2 * 2 * 2 * 6, 2 * 6, 1])


def test_vectorized_map():
    f = polybridge.wrap(lambda x: x / x.sum(), src="torch", dst="tf")
    found = tf.vectorized_map(f, tf.constant([[1.0, 1.0], [1.0, 3.0]]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.25, 0.75]])


def test_vectorized_map_inside_a_tf_function():
    f = polybridge.wrap(lambda x: x / x.sum(), src="torch", dst="tf")
    found = tf.function(lambda x: tf.vectorized_map(f, x))(tf.constant([[1.0, 1.0], [1.0, 3.0]]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.25, 0.75]])


def test_the_gradient_of_vectorized_map():
    _, g = in_graph(lambda x: tf.vectorized_map(lambda x: SQUARE(x) * x, x))
    np.testing.assert_allclose(g, 3 * X**2)


def test_recompute_grad():
    y, g = in_graph(tf.recompute_grad(lambda x: SQUARE(x) * x))
    np.testing.assert_allclose(y, X**3)
    np.testing.assert_allclose(g, 3 * X**2)


def test_recompute_grad_in_eager_mode():
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.recompute_grad(lambda x: SQUARE(x) * x)(X)
    np.testing.assert_allclose(tape.gradient(y, X), 3 * X**2)


@pytest.mark.parametrize("parallel", [None, 2, tf.data.AUTOTUNE], ids=["serial", "two", "autotune"])
def test_dataset_map(parallel):
    data = tf.data.Dataset.range(20, output_type=tf.float32).batch(3).map(SQUARE, num_parallel_calls=parallel)
    np.testing.assert_array_equal(np.concatenate(list(data.as_numpy_iterator())), np.arange(20.0) ** 2)


def test_dataset_map_with_a_gradient_inside():
    def derivative(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = SQUARE(x)
        return tape.gradient(y, x)

    data = tf.data.Dataset.range(8, output_type=tf.float32).batch(4).map(derivative, num_parallel_calls=2)
    np.testing.assert_array_equal(np.concatenate(list(data.as_numpy_iterator())), 2 * np.arange(8.0))


def test_numpy_function_and_py_function_around_the_call():
    y = tf.function(lambda x: tf.py_function(SQUARE, [x], tf.float32))(X)
    np.testing.assert_array_equal(y, X**2)


def test_a_while_loop_in_eager_mode_is_eager():
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, SQUARE(x)), [0, X])[1]
    np.testing.assert_allclose(tape.gradient(y, X), 4 * X**3)


def test_a_map_over_a_ragged_batch_of_rows():
    f = polybridge.wrap(lambda x: x.sum(), src="torch", dst="tf")
    rows = tf.ragged.constant([[1.0, 2.0], [3.0]])
    found = tf.map_fn(f, rows, fn_output_signature=tf.float32)
    np.testing.assert_array_equal(found, [3, 3])
