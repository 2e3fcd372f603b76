"""Asks what only TensorFlow has of a toy function in it: graphs, tapes, unknown shapes."""

import numpy as np
import pytest
import tensorflow as tf
import toy

import polybridge


def in_tf(fn, **options):
    return polybridge.wrap(fn, src="toy", dst="tensorflow", **options)


def test_a_graph_is_traced_once():
    f = in_tf(lambda x: x**2)
    traces = []
    graph = tf.function(lambda x: traces.append(1) or f(x))
    assert [graph(tf.constant(float(n))).numpy() for n in range(3)] == [0.0, 1.0, 4.0]
    assert len(traces) == 1


def test_an_unknown_dimension_stays_unknown_and_runs_at_every_size():
    f = in_tf(lambda x: x**2)
    graph = tf.function(lambda x: f(x), input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    assert graph.get_concrete_function().structured_outputs.shape.as_list() == [None, 2]
    for size in (0, 1, 5):
        assert graph(tf.fill([size, 2], tf.constant(3.0, tf.float64))).numpy().tolist() == [[9.0, 9.0]] * size


def test_the_gradient_of_an_unknown_dimension():
    f = in_tf(lambda x: (x**2).sum())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    assert gradient(tf.constant([1.0, 2.0, 3.0], tf.float64)).numpy().tolist() == [2.0, 4.0, 6.0]


def test_three_orders_inside_one_graph():
    f = in_tf(lambda x: x**5)

    @tf.function
    def derivatives(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as middle:
                middle.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = f(x)
                first = inner.gradient(y, x)
            second = middle.gradient(first, x)
        return first, second, outer.gradient(second, x)

    found = derivatives(tf.constant(2.0, tf.float64))
    assert [d.numpy() for d in found] == [80.0, 160.0, 240.0]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_jacobian(graph):
    f = in_tf(lambda x: x**2)

    def jacobian(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x)

    run = tf.function(jacobian) if graph else jacobian
    assert run(tf.constant([1.0, 2.0], tf.float64)).numpy().tolist() == [[2.0, 0.0], [0.0, 4.0]]


def test_unconnected_gradients_follow_the_tapes_own_choice():
    f = in_tf(lambda x, w: x * 3)
    x = w = tf.constant([1.0, 2.0])
    w = tf.identity(w)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y = f(x, w)
    assert tape.gradient(y, w) is None
    assert tape.gradient(y, w, unconnected_gradients="zero").numpy().tolist() == [0.0, 0.0]


def test_a_variable_is_differentiated():
    f, v = in_tf(lambda x: x**2), tf.Variable([3.0])
    with tf.GradientTape() as tape:
        y = f(v)
    assert tape.gradient(y, v).numpy().tolist() == [6.0]


def test_a_result_whose_shape_depends_on_values_is_an_error():
    """The placeholders are ones, so the plan promises all three."""
    f = in_tf(lambda x: x[x.value > 0])
    graph = tf.function(lambda x: f(x))
    with pytest.raises(Exception, match=r"float64\[1\].*float64\[3\] was promised"):
        graph(tf.constant([1.0, -1.0, -1.0], tf.float64))
    assert isinstance(polybridge.last_error(), polybridge.PromisedShapeError)


def test_output_specs_let_a_result_depend_on_values():
    f = in_tf(lambda x: x[x.value > 0], output_specs=polybridge.TensorSpec((None,), "float64"))
    graph = tf.function(lambda x: f(x))
    assert graph(tf.constant([1.0, -1.0, 2.0], tf.float64)).numpy().tolist() == [1.0, 2.0]


def test_the_functions_exception_can_be_had_from_a_graph():
    def fail(x):
        if (x.value != 1).any():  # the placeholders are ones
            raise KeyError("mine")
        return x

    graph = tf.function(in_tf(fail))
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'mine'"):
        graph(tf.constant(2.0))
    assert isinstance(polybridge.last_error(), KeyError)


def test_training_a_toy_model_with_a_tape():
    f = in_tf(lambda w, x: (toy.matmul(x, w) ** 2).sum())
    w, x = tf.Variable(np.ones((2, 1))), tf.constant(np.eye(2))
    with tf.GradientTape() as tape:
        loss = f(w, x)
    assert loss.numpy() == 2.0
    assert tape.gradient(loss, w).numpy().tolist() == [[2.0], [2.0]]
