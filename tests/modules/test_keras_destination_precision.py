"""Asks of bridged layers that dtypes follow the policy, and that half precision hides nothing."""

import copy
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import polybridge
from tests.modules.nets import Net, scaled_pair

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 4)).astype("float32")
Y = RANDOM.standard_normal((16, 2)).astype("float32")
NARROW = ("float16", "bfloat16")


@pytest.fixture(params=NARROW)
def narrow(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{request.param}")
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_mixed_policy_is_torchs_autocast(dtype, graph):
    torch.manual_seed(0)
    module = Net(dropout=0.0)
    twin = copy.deepcopy(module)
    layer = polybridge.wrap(module, dst="keras", dtype=f"mixed_{dtype}")

    def step(x):
        with tf.GradientTape() as tape:
            out = layer(x, training=True)
            loss = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
        return out, tape.gradient(loss, layer.trainable_variables)

    out, gradients = (tf.function(step) if graph else step)(tf.constant(X))
    with torch.autocast("cpu", getattr(torch, dtype)):
        native = twin(torch.from_numpy(X).to(getattr(torch, dtype)))
    native.float().square().sum().backward()
    assert out.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(out, tf.float32), native.float().detach())
    for gradient, parameter in zip(gradients, twin.parameters(), strict=True):
        assert gradient.dtype == tf.float32
        np.testing.assert_allclose(gradient, parameter.grad, 1e-5, 1e-6)
    for name, buffer in twin.named_buffers():
        assert layer.state[name].dtype == str(buffer.dtype).removeprefix("torch.")
        np.testing.assert_allclose(layer.state[name], buffer, 1e-6)


def test_a_global_policy_trains_with_the_optimizer_that_keras_chooses(narrow):
    torch.manual_seed(0)
    layer = polybridge.wrap(Net(dropout=0.0), dst="keras")
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (narrow == "float16")
    losses = model.fit(X, Y, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert {v.dtype for v in layer.trainable_variables} == {"float32"}
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    layer = polybridge.wrap(nn.Linear(4, 2), dst="keras", dtype="mixed_float16")
    model = keras.Sequential([layer])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**20)
    model.compile(optimizer, "mse")
    before = layer.get_weights()
    model.fit(100 * X, 100 * Y, verbose=0)
    assert all(itertools.starmap(np.array_equal, zip(layer.get_weights(), before, strict=True)))
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**19
    model.fit(X, Y, epochs=20, verbose=0)
    assert all(np.isfinite(w).all() for w in layer.get_weights())
    assert not np.array_equal(layer.get_weights()[0], before[0])


def test_infinity_is_handed_on():
    layer = polybridge.wrap(nn.Linear(4, 2), dst="keras", dtype="mixed_float16")
    layer.params["weight"].assign(np.ones((2, 4)))
    assert np.isposinf(layer(np.full((1, 4), 3e4, "float32")).numpy()).all()


@pytest.mark.parametrize("dtype", ["float64", *NARROW])
def test_a_module_in_another_dtype_has_a_policy_of_its_own(dtype):
    module = nn.Linear(4, 2).to(getattr(torch, dtype))
    layer = polybridge.wrap(module, dst="keras")
    out = layer(X)
    assert layer.dtype_policy.name == dtype and out.dtype.name == dtype
    assert {v.dtype for v in layer.weights} == {dtype}
    expected = module(torch.from_numpy(X).to(module.weight.dtype)).detach().double()
    np.testing.assert_array_equal(tf.cast(out, tf.float64), expected)


def test_a_source_without_such_a_mode_gets_narrow_weights(narrow):
    fn, params, state = scaled_pair()
    layer = polybridge.wrap(fn, src="jax", dst="keras", params=params, state=state)
    with tf.GradientTape() as tape:
        out = layer(X, training=True)
        loss = tf.reduce_sum(tf.cast(out, tf.float32))
    gradient = tape.gradient(loss, layer.params["w"].value)
    assert out.dtype.name == narrow and gradient.dtype == tf.float32 and layer.state["steps"].dtype == "int32"
    np.testing.assert_allclose(gradient[:, 0], X.sum(0), 0.02, 0.05)
