"""Asks of JAX functions in TensorFlow graphs that they are planned without being run, right, and never hang."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import polybridge
from tests.semantics.processes import run
from tests.semantics.scenarios import tf_orders

jax.config.update("jax_enable_x64", True)


def in_tf(fn, **options):
    return polybridge.wrap(fn, src="jax", dst="tensorflow", **options)


def orders(fn):
    """Return a TensorFlow function from x to value, first and second derivative of `fn`."""
    return functools.partial(tf_orders, fn)


def test_orders_in_a_graph_are_analytic():
    found = tf.function(orders(in_tf(lambda x: x**5)))(tf.constant([2.0], tf.float64))
    assert [float(y[0]) for y in found] == [32.0, 80.0, 160.0]


def test_tracing_a_graph_and_running_it_trace_the_function_once():
    traces = []
    graph = tf.function(in_tf(lambda x: traces.append(1) or jnp.sin(x)))
    for _ in range(3):
        graph(tf.ones([2]))
    assert traces == [1]


def test_planning_runs_nothing():
    seen = []
    wrapped = in_tf(lambda x: jax.debug.callback(lambda v: seen.append(float(v[0])), x) or x * 2)
    tf.function(wrapped).get_concrete_function(tf.TensorSpec([2]))
    assert seen == []


def test_unknown_dimensions_stay_unknown():
    graph = tf.function(in_tf(lambda x: (x.T @ x, x.sum(1))), input_signature=[tf.TensorSpec([None, 3])])
    assert [y.shape.as_list() for y in graph.get_concrete_function().outputs] == [[3, 3], [None]]
    assert graph(tf.ones([5, 3]))[0].numpy().tolist() == [[5.0] * 3] * 3


def test_an_input_without_influence_has_no_gradient_in_a_graph():
    """Case 31."""

    @tf.function
    def gradients(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            y = in_tf(lambda a, b: a * 2)(a, b)
        found = tape.gradient(y, [a, b])
        assert found[1] is None
        return found[0]

    assert gradients(tf.ones(2), tf.ones(2)).numpy().tolist() == [2.0, 2.0]


def test_integers_pass_beside_floats_in_a_graph():
    @tf.function
    def gradient(w, i):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y, position = in_tf(lambda w, i: (w[i], jnp.argmax(w)))(w, i)
        return tape.gradient(y, w), position

    found, position = gradient(tf.constant([1.0, 3.0, 2.0]), tf.constant([0, 2, 2]))
    assert (found.numpy().tolist(), int(position)) == ([1.0, 0.0, 2.0], 1)


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
def test_a_function_of_values_is_planned_on_placeholders():
    found = tf.function(orders(in_tf(lambda x: x**3 if x.sum() > 0 else x * 3)))(tf.constant([2.0]))
    assert [float(y[0]) for y in found] == [8.0, 12.0, 12.0]


def test_precision_of_the_thread_that_traced_is_that_of_the_callback():
    """Case 39."""
    seen = []

    def fn(x):
        seen.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
        return x * 2

    with jax.default_matmul_precision("float32"):
        graph = tf.function(in_tf(fn))
        graph(tf.ones([2]))
        graph(tf.ones([2]))
    assert set(seen) == {(True, "float32")}


def test_a_session_of_tensorflow_1_differentiates_a_jax_function():
    tf1 = tf.compat.v1
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float64, [None])
        y = in_tf(lambda x: x**3)(x)
        (first,) = tf1.gradients(y, x)
        (second,) = tf1.gradients(first, x)
        found = session.run([y, first, second], {x: np.array([2.0, 3.0])})
    assert [a.tolist() for a in found] == [[8.0, 27.0], [12.0, 27.0], [12.0, 18.0]]


def test_an_error_of_the_function_is_remembered():
    """Case 58."""

    def fail(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tf.function(in_tf(fail))(tf.ones([2]))
    assert isinstance(polybridge.last_error(), KeyError)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [10, 4_000_000])
def test_calls_from_several_threads_end(size, threads):
    """Cases 56 and 57."""
    code = f"""
        import threading
        import jax.numpy as jnp, tensorflow as tf, polybridge
        tf.config.threading.set_inter_op_parallelism_threads({threads})
        fn = polybridge.wrap(lambda x: x * x * x, src="jax", dst="tf")

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(fn(x))
            return tape.gradient(y, x)

        def check():
            for _ in range(3):
                assert float(step(tf.ones([{size}]))[-1]) == 9
        workers = [threading.Thread(target=check) for _ in range(3)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        print("ended")
    """
    assert run(code, seconds=100) == "ended\n"
