"""Asks that TensorFlow's ways of building a graph work together around one wrapped function, as around a native one."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

WRAPPED = polybridge.wrap(lambda x: torch.sin(x) * x, src="torch", dst="tf")
INNER = tf.function(WRAPPED)


def native(x):
    """Return what WRAPPED returns, by TensorFlow itself."""
    return tf.sin(x) * x


def with_gradient(fn, x):
    """Return value and gradient of the sum of `fn(x)`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    return y, tape.gradient(y, x)


def loop_around_cond(f):
    """Return the function that applies `f` or a sum three times, as the values say."""

    def body(i, x):
        return i + 1, tf.cond(tf.reduce_sum(x) > 1.0, lambda: f(x), lambda: x + 0.5)

    return lambda x: tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


def cond_around_loop(f):
    """Return the function that loops in one branch only."""

    def looped(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, f(x)), [0, x])[1]

    return lambda x: tf.cond(tf.reduce_sum(x) > 1.0, lambda: looped(x), lambda: f(x) * 2.0)


def loop_around_map(f):
    """Return the function that maps over the first axis, twice."""
    return lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.map_fn(f, x)), [0, x])[1]


def scan_around_cond(f):
    """Return the running sum of `f` where that is positive."""

    def step(total, x):
        return total + tf.cond(x > 0.0, lambda: f(x), lambda: -x)

    return lambda x: tf.scan(step, x, initializer=tf.constant(0.0))


def autograph(f):
    """Return a function in Python's own control flow on tensors."""

    @tf.function
    def fn(x):
        for i in tf.range(3):
            if tf.reduce_sum(x) > 1.0:
                x = f(x)
            elif i > 1:
                break
            else:
                x = x + 0.5
        return x

    return fn


BODIES = {
    "call": lambda f: f,
    "call of a call": lambda f: lambda x: f(f(x)) + f(x),
    "nested tf.function": lambda f: lambda x: tf.function(lambda x: tf.function(f)(x) * x)(x),
    "cond in while_loop": loop_around_cond,
    "while_loop in cond": cond_around_loop,
    "map_fn in while_loop": loop_around_map,
    "cond in scan": scan_around_cond,
    "autograph": autograph,
    "recompute_grad in map_fn": lambda f: loop_around_map(tf.recompute_grad(f)),
    "custom_gradient": lambda f: tf.custom_gradient(lambda x: (f(x), lambda ct: 3.0 * f(ct))),
}
OPTIONS = {
    "plain": {},
    "reduce_retracing": {"reduce_retracing": True},
    "unknown dims": {"input_signature": [tf.TensorSpec([None])]},
    "no autograph": {"autograph": False},
}
INPUTS = [
    tf.constant([0.4, 1.2, -0.3]),
    tf.constant([2.0, 0.1]),
    tf.constant([0.1, -0.2, 0.3, 0.2]),
]  # 2 signatures, 3 runs


GRAPHS = [(name, "plain") for name in BODIES]
GRAPHS += [(name, option) for name in ("call", "nested tf.function", "cond in while_loop") for option in OPTIONS]


@pytest.mark.parametrize(("name", "option"), dict.fromkeys(GRAPHS))
def test_value_and_gradient_are_those_of_native_tensorflow(name, option):
    def traced(f):
        return tf.function(lambda x: with_gradient(BODIES[name](f), x), **OPTIONS[option])

    found, expected = traced(WRAPPED), traced(native)
    for x in INPUTS:
        for ours, theirs in zip(found(x), expected(x), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BODIES)
def test_a_tape_around_the_graph_gets_the_native_gradient(name):
    found, expected = (tf.function(BODIES[name](f)) for f in (INNER, native))
    for x in INPUTS:
        for ours, theirs in zip(with_gradient(found, x), with_gradient(expected, x), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["call", "nested tf.function", "cond in while_loop", "autograph"])
def test_the_second_derivative_is_the_native_one(name):
    def second(f):
        return tf.function(lambda x: with_gradient(lambda x: with_gradient(BODIES[name](f), x)[1], x)[1])

    for x in INPUTS:
        np.testing.assert_allclose(second(WRAPPED)(x), second(native)(x), rtol=1e-4, atol=1e-5)


def test_two_signatures_of_one_function_are_differentiated_side_by_side():
    step = tf.function(lambda a, b: (*with_gradient(WRAPPED, a), *with_gradient(WRAPPED, b)))
    expected = tf.function(lambda a, b: (*with_gradient(native, a), *with_gradient(native, b)))
    a, b = tf.constant([1.0, 2.0]), tf.constant([[3.0]], tf.float64)
    for ours, theirs in zip(step(a, b), expected(a, b), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("parallel", [None, 2])
def test_a_dataset_that_maps_a_map_with_gradients(parallel):
    def rows(f):
        data = tf.data.Dataset.range(12, output_type=tf.float32).batch(4)
        mapped = data.map(lambda x: with_gradient(lambda x: tf.map_fn(f, x), x), num_parallel_calls=parallel)
        return np.array(list(mapped.as_numpy_iterator()))

    np.testing.assert_allclose(rows(WRAPPED), rows(native), rtol=1e-5, atol=1e-6)
