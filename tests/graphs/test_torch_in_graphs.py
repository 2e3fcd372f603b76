"""Asks that a torch function with a TensorFlow source works while TensorFlow happens to be building a graph."""

import contextlib

import pytest
import tensorflow as tf
import torch

import polybridge

SQUARE = polybridge.wrap(lambda x: x * x, src="tf", dst="torch")


def differentiated():
    """Return value, first and second derivative of x**2 at 3, by torch."""
    t = torch.tensor([3.0], requires_grad=True)
    y = SQUARE(t)
    (g,) = torch.autograd.grad(y, t, create_graph=True)
    (h,) = torch.autograd.grad(g, t)
    return y.item(), g.item(), h.item()


def traced(fn):
    """Return what `fn` returns while a `tf.function` is traced."""
    found = []
    tf.function(lambda: found.append(fn()) or 0)()
    return found[0]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_while_a_tf_function_is_traced(order):
    assert traced(differentiated)[order] == [9, 6, 2][order]


def test_while_a_tf_function_is_traced_under_a_tape():
    with tf.GradientTape():
        assert traced(differentiated) == (9, 6, 2)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_while_a_plain_graph_is_built(order):
    with tf.Graph().as_default():
        assert differentiated()[order] == [9, 6, 2][order]


def test_while_a_session_is_the_default():
    with tf.Graph().as_default(), tf.compat.v1.Session():
        assert differentiated() == (9, 6, 2)


def test_with_an_inner_tf_function_while_another_is_traced():
    inner = polybridge.wrap(tf.function(lambda x: x**3), src="tf", dst="torch")

    def gradient():
        t = torch.tensor([2.0], requires_grad=True)
        return torch.autograd.grad(inner(t), t)[0].item()

    assert traced(gradient) == 12


def test_backward_in_a_graph_of_a_forward_that_was_outside():
    t = torch.tensor([3.0], requires_grad=True)
    y = SQUARE(t)
    with tf.Graph().as_default():
        y.backward()
    assert t.grad.item() == 6


def test_backward_outside_of_a_forward_that_was_in_a_graph():
    t = torch.tensor([3.0], requires_grad=True)
    with tf.Graph().as_default():
        y = SQUARE(t)
    y.backward()
    assert t.grad.item() == 6


@pytest.mark.parametrize("context", [tf.GradientTape, contextlib.nullcontext], ids=["tape", "none"])
def test_a_tape_around_torch_code_changes_nothing(context):
    with context():
        assert differentiated() == (9, 6, 2)


def test_a_variable_that_the_function_closes_over_is_read_while_tracing():
    v = tf.Variable(2.0, trainable=False)
    f = polybridge.wrap(lambda x: x * v, src="tf", dst="torch")
    assert traced(lambda: f(torch.tensor(5.0)).item()) == 10
