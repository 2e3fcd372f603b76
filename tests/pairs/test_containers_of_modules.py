"""Asks that the lists and dicts of weights that modules hold are arguments like any others, and get gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge


class Layer(keras.layers.Layer):
    """Two weights."""

    def __init__(self):
        super().__init__()
        self.first = self.add_weight(shape=(2,), initializer="ones")
        self.second = self.add_weight(shape=(2,), initializer="ones")


class Module(tf.Module):
    """Two weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0])


CONTAINERS = {
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"a": a, "b": {"b": b}},
    "tuple": lambda a, b: (a, (b,)),
}


def product(weights, x):
    (a, b) = weights.values() if isinstance(weights, dict) else weights
    (b,) = b.values() if isinstance(b, dict) else b
    return a * b * b * x


@pytest.mark.parametrize("src", ["torch", "jax"])
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("owner", [Layer, Module])
@pytest.mark.parametrize("mode", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_weights_in_a_container_of_a_module_get_gradients(owner, make, src, mode):
    module = owner()
    module.held = make(module.first, module.second)
    f = polybridge.wrap(product, src=src, dst="tf")
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape() as tape:
        y = mode(lambda: f(module.held, x))()
    da, db = tape.gradient(y, [module.first, module.second])
    assert (da.numpy().tolist(), db.numpy().tolist()) == ([2.0, 3.0], [4.0, 6.0])


def test_a_container_of_a_module_arrives_as_a_plain_one():
    module = Module()
    module.held = {"b": [module.second], "a": (module.first,)}
    f = polybridge.wrap(lambda x: x, src="torch", dst="tf")
    result = f(module.held)
    assert (list(result), type(result), type(result["b"]), type(result["a"])) == (["b", "a"], dict, list, tuple)
    assert type(polybridge.convert(module.held, "numpy")) is dict


@pytest.mark.parametrize("src", ["tf", "jax"])
@pytest.mark.parametrize(
    "make", [lambda a: torch.nn.ParameterList([a]), lambda a: torch.nn.ParameterDict({"a": a})], ids=["list", "dict"]
)
def test_parameters_in_a_container_get_gradients(make, src):
    def scaled(weights, x):
        (a,) = weights.values() if isinstance(weights, dict) else weights
        return a * x

    a = torch.nn.Parameter(torch.ones(2))
    polybridge.wrap(scaled, src=src, dst="torch")(make(a), torch.tensor([2.0, 3.0])).sum().backward()
    np.testing.assert_array_equal(a.grad, [2.0, 3.0])
