"""Asks how often a wrapped function is traced and run: once per signature, and once per step whatever the order."""

import numpy as np
import pytest
import tensorflow as tf
from torch._subclasses.fake_tensor import FakeTensor

import polybridge


class Counted:
    """x**3 in torch, which counts its runs on values and on placeholders."""

    def __init__(self):
        self.runs = self.traces = 0
        self.wrapped = polybridge.wrap(self, src="torch", dst="tf")

    def __call__(self, x):
        if isinstance(x, FakeTensor):
            self.traces += 1
        else:
            self.runs += 1
        return x**3


def gradient(fn, order):
    """Return the derivative of `fn` of an order, with its value beside it."""

    def differentiated(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x) if order == 1 else gradient(fn, order - 1)(x)
        return tape.gradient(y, x)

    return fn if order == 0 else differentiated


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["eager", "inside", "around"])
def test_the_function_runs_once_per_step(mode, order):
    f = Counted()
    step = {
        "eager": lambda: gradient(f.wrapped, order),
        "inside": lambda: tf.function(gradient(f.wrapped, order)),
        "around": lambda: gradient(tf.function(f.wrapped), order),
    }[mode]()
    step(tf.constant([2.0]))
    before = f.runs
    for _ in range(3):
        step(tf.constant([2.0]))
    assert f.runs - before == 3


@pytest.mark.parametrize("mode", ["eager", "inside", "around"])
def test_the_first_step_runs_the_function_once_too(mode):
    f = Counted()
    wrapped = tf.function(f.wrapped) if mode == "around" else f.wrapped
    step = tf.function(gradient(wrapped, 1)) if mode == "inside" else gradient(wrapped, 1)
    np.testing.assert_allclose(step(tf.constant([2.0])), [12])
    assert f.runs == 1


def test_a_signature_is_traced_once():
    f = Counted()
    step = tf.function(gradient(f.wrapped, 2))
    step(tf.constant([2.0]))
    traces = f.traces
    for value in (1.0, 2.0, 3.0):
        step(tf.constant([value]))
    assert f.traces == traces > 0


def test_a_second_tf_function_needs_no_second_trace():
    f = Counted()
    tf.function(f.wrapped)(tf.constant([2.0]))
    traces = f.traces
    tf.function(lambda x: f.wrapped(x) + 1)(tf.constant([2.0]))
    assert f.traces == traces


def test_a_concrete_signature_is_traced_on_one_placeholder():
    f = Counted()
    tf.function(f.wrapped)(tf.constant([2.0]))
    assert f.traces == 1


def test_eager_mode_traces_nothing():
    f = Counted()
    gradient(f.wrapped, 2)(tf.constant([2.0]))
    assert f.traces == 0


def test_an_unknown_dimension_is_traced_at_two_sizes():
    f = Counted()
    step = tf.function(f.wrapped, input_signature=[tf.TensorSpec([None])])
    step(tf.ones(3))
    step(tf.ones(5))
    assert f.traces == 2


def test_a_result_that_nobody_reads_is_still_computed_at_most_once():
    f = Counted()

    @tf.function
    def step(x):
        f.wrapped(x)
        return x

    step(tf.constant([2.0]))
    assert f.runs <= 1


def test_the_pullback_is_not_run_for_a_gradient_that_nobody_asks_for():
    """x**3 and its pullback in torch: without a tape only the forward runs."""
    pulls = []

    def fn(x):
        y = x**3
        if y.requires_grad:
            y.register_hook(lambda ct: pulls.append(1))
        return y

    f = polybridge.wrap(fn, src="torch", dst="tf")
    tf.function(f)(tf.constant([2.0]))
    pulls.clear()
    tf.function(f)(tf.constant([2.0]))
    assert pulls == []


def test_second_order_runs_the_pullback_twice_and_the_function_once():
    """The outer derivative replays the pullback, never the forward."""
    f = Counted()
    step = tf.function(gradient(f.wrapped, 2))
    step(tf.constant([2.0]))
    f.runs = 0
    np.testing.assert_allclose(step(tf.constant([2.0])), [12])
    assert f.runs == 1
