"""Asks that what a graph computes, and when there is one, is what eager calls show."""

import numpy as np
import pytest
import tensorflow as tf

import polybridge
from polybridge.backends.tensorflow import tracing
from polybridge.backends.tensorflow.tracing import Traced


def counted(fn):
    runs = []

    def run(*args, **kwargs):
        runs.append(tf.executing_eagerly())
        return fn(*args, **kwargs)

    return Traced(run, "f"), runs


def test_a_kind_of_calls_is_traced_when_it_comes_back():
    traced, runs = counted(lambda x, scale: {"y": x * scale, "scale": scale})
    for value in (1.0, 2.0, 3.0):
        assert float(traced("kind", tf.constant(value), scale=2)["y"]) == 2 * value
    assert runs == [True, False]
    assert traced("kind", tf.constant(1.0), scale=2)["scale"] == 2
    traced("kind", tf.constant(1.0), scale=3)
    traced("other", tf.constant(1.0), scale=2)
    traced("kind", tf.constant([1.0]), scale=2)
    assert runs == [True, False, True, True, True]


def test_derivatives_of_any_order_pass_through_a_graph():
    traced, _ = counted(lambda x: tf.sin(x) * x)
    x = tf.constant([0.5, 1.5], tf.float64)
    for _ in range(3):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                y = traced(None, x)
            g = inner.gradient(y, x)
        np.testing.assert_allclose(g, np.cos(x) * x + np.sin(x))
        np.testing.assert_allclose(outer.gradient(g, x), 2 * np.cos(x) - np.sin(x) * x)
        for _ in range(2):
            np.testing.assert_allclose(inner.gradient(y, x), np.cos(x) * x + np.sin(x))


def test_a_random_graph_has_the_derivative_of_its_own_draw():
    traced, _ = counted(lambda x: x * tf.random.uniform(x.shape))
    x = tf.ones(5)
    for _ in range(3):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = traced(None, x)
            g = tape.gradient(y, x)
        np.testing.assert_array_equal(g, y)


def test_an_error_is_that_of_eager_tensorflow_and_keeps_the_graphs():
    def fn(x):
        if x.shape[0] == 2:
            raise KeyError("two")
        return x * 2

    traced, runs = counted(fn)
    for _ in range(3):
        with pytest.raises(KeyError, match="two"):
            traced(None, tf.ones(2))
    runs.clear()
    for _ in range(4):
        traced(None, tf.ones(3))
    assert runs == [True, False]


def test_what_only_runs_eagerly_is_never_traced_again():
    traced, runs = counted(lambda x: x * float(x))
    traced(None, tf.constant(2.0))
    with pytest.warns(polybridge.UntracedWarning, match="`f` runs operation by operation"):
        assert float(traced(None, tf.constant(3.0))) == 9
    runs.clear()
    assert float(traced(None, tf.constant(4.0))) == 16 and runs == [True]


def test_graphs_are_bounded(monkeypatch):
    monkeypatch.setattr(tracing, "_GRAPHS", 3)
    traced, _ = counted(lambda x: x + 1)
    for size in range(10):
        for _ in range(2):
            traced(None, tf.ones(size))
    assert len(traced._graphs) == 3


def test_inside_of_a_graph_there_is_no_other():
    traced, runs = counted(lambda x: x * 2)

    @tf.function
    def outer(x):
        return traced(None, x)

    for _ in range(3):
        assert float(outer(tf.constant(3.0))) == 6
    assert runs == [False]
