"""Asks that wrapped functions work inside what the frameworks put around a function, or are refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils.checkpoint import checkpoint

import polybridge
from tests.semantics.calls import to_tf, to_torch, with_gradient


class Squared(tf.Module):
    """Holds a bridged call."""

    def __init__(self):
        super().__init__()
        self.square = to_tf(torch.square)

    @tf.function
    def __call__(self, x):
        """Return the square."""
        return self.square(x)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_saved_model_is_refused_by_name(dtype, tmp_path, capfd):
    model = Squared()
    model(tf.ones([3], dtype))
    with pytest.raises(ValueError, match="SavedModel"):
        tf.saved_model.save(model, str(tmp_path))
    error = polybridge.last_error()
    assert isinstance(error, polybridge.CompilationError)
    for part in ("square (src='torch', dst='tensorflow')", "SavedModel", "save_weights"):
        assert part in str(error)


class Dense(keras.layers.Layer):
    """A dense layer whose product is computed by torch, or natively."""

    def __init__(self, units, matmul):
        super().__init__()
        self.units, self.matmul = units, matmul

    def build(self, shape):
        """Make the weight, of a fixed start."""
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer=keras.initializers.Constant(0.1))

    def call(self, x):
        """Return `tanh(x @ kernel)`."""
        return self.matmul(x, self.kernel)


def trained(matmul, **options):
    """Return the weights and the losses of a Keras model after `fit`."""
    model = keras.Sequential([Dense(4, matmul), Dense(1, matmul)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", **options)
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)
    history = model.fit(x, x.sum(1, keepdims=True), batch_size=5, epochs=3, shuffle=False, verbose=0)
    return [*model.get_weights(), history.history["loss"], model.predict(x, verbose=0)]


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_keras_fits_a_layer_with_a_wrapped_call_as_a_native_one(options):
    found = trained(to_tf(lambda x, w: torch.tanh(x @ w)), **options)
    expected = trained(lambda x, w: tf.tanh(x @ w), **options)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_keras_that_compiles_names_the_option():
    with pytest.raises(polybridge.CompilationError, match=r"compile\(jit_compile=False\)"):
        trained(to_tf(lambda x, w: torch.tanh(x @ w)), jit_compile=True)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_gradient_of_a_custom_gradient_may_be_a_wrapped_call(mode):
    """d(x**3) = 3 x**2, once with a wrapped primal, twice through the wrapped derivative: 6 x."""
    cube, derivative = to_tf(lambda x: x**3), to_tf(lambda x, ct: 3 * x**2 * ct)
    f = tf.custom_gradient(lambda x: (cube(x), lambda ct: derivative(x, ct)))

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, g = with_gradient(f, x)
        return g, tape.gradient(g, x)

    g, h = (tf.function(both) if mode == "graph" else both)(tf.constant([1.0, 2.0]))
    assert (g.numpy().tolist(), h.numpy().tolist()) == ([3, 12], [6, 12])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_torch_checkpoint_recomputes_through_the_call(reentrant):
    runs = []
    cube = to_torch(lambda x: (runs.append(1), x**3)[1])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    checkpoint(lambda x: cube(x) * x, x, use_reentrant=reentrant).sum().backward()
    assert x.grad.tolist() == [4, 32] and len(runs) == 2


class Wrapped(torch.nn.Module):
    """A module around a TensorFlow function."""

    def __init__(self, fn):
        super().__init__()
        self.fn = to_torch(fn)

    def forward(self, x):
        """Call the function."""
        return self.fn(x)


def test_inference_mode_around_a_wrapped_call_inside_a_native_module():
    layer = torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(layer, Wrapped(tf.tanh))
    x = torch.tensor([[1.0, 2.0]])
    with torch.inference_mode():
        y = module(x)
    assert y.is_inference()
    torch.testing.assert_close(y.clone(), torch.tanh(layer(x)).detach())


def test_a_module_with_a_wrapped_call_trains_as_a_native_one():
    torch.manual_seed(0)  # the two tanh differ in the last bit, which some weights multiply by a hundred
    module, native = torch.nn.Sequential(torch.nn.Linear(2, 1), Wrapped(tf.tanh)), torch.nn.Linear(2, 1)
    native.load_state_dict(module[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (module, native)]
    x = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])
    for _ in range(5):
        for optimizer, fn in zip(optimizers, (module, lambda x: torch.tanh(native(x))), strict=True):
            optimizer.zero_grad()
            fn(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(module[0].weight, native.weight)
