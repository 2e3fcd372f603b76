"""Asks of bridged modules that torch's autocast and gradient scaler find in them what they find in torch's own."""

import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import polybridge
from tests.modules import keras_models

NARROW = ("bfloat16", "float16")
X = np.random.default_rng(0).standard_normal((5, 4)).astype("float32")


def autocast(name):
    return torch.autocast("cpu", getattr(torch, name))


def attending():
    layers = keras.layers
    x = layers.Input((4,))
    y = layers.LSTM(8, return_sequences=True)(layers.Reshape((4, 1))(x))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4)(y, y))
    return keras.Model(x, layers.Dense(2, "softmax", dtype="float64")(layers.GlobalAveragePooling1D()(y)))


def in_policy(make, name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{name}")
    try:
        return make()
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("make", [keras_models.normalised, attending])
def test_a_keras_model_computes_as_under_keras_own_mixed_policy(make, dtype):
    model, native = make(), in_policy(make, dtype)
    native.set_weights(model.get_weights())
    module = polybridge.wrap(model, dst="torch")
    for _ in range(3):  # eagerly, traced, and from a graph
        x, same = torch.tensor(X, requires_grad=True), tf.constant(X)
        with autocast(dtype):
            out = module(x)
        module.zero_grad()
        out.double().square().sum().backward()
        with tf.GradientTape() as tape:
            tape.watch(same)
            expected = native(same, training=True)
            loss = tf.reduce_sum(tf.cast(expected, tf.float64) ** 2)
        wanted = tape.gradient(loss, [*(v.value for v in native.trainable_variables), same])
        assert str(out.dtype) == f"torch.{expected.dtype.name}"
        np.testing.assert_array_equal(out.detach().double(), tf.cast(expected, tf.float64))
        for given, gradient in zip([*module.parameters(), x], wanted, strict=True):
            assert given.grad.dtype == given.dtype
            np.testing.assert_allclose(given.grad, gradient, 0.02, 0.02)
    module.sync_to_source()
    for found, expected in zip(model.get_weights(), native.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)  # statistics


def test_what_is_outside_of_autocast_is_not_in_the_policy():
    model = keras_models.mlp()
    module = polybridge.wrap(model, dst="torch")
    x, expected = torch.from_numpy(X), model(X).numpy()
    for _ in range(3):
        with autocast("bfloat16"):
            assert module(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                np.testing.assert_array_equal(module(x).detach(), expected)
        np.testing.assert_array_equal(module(x).detach(), expected)
    assert all(type(layer.dtype_policy) is keras.DTypePolicy for layer in model.layers)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


class Waits(keras.layers.Layer):
    """Holds a call up until the test has made another one on another thread."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def call(self, x):
        if x.dtype == tf.bfloat16 and not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(60)
        return x


def test_other_threads_compute_in_their_own_dtype_meanwhile():
    waits = Waits()
    model = keras.Sequential([keras.layers.Input((4,)), waits, keras.layers.Dense(2)])
    module, found = polybridge.wrap(model, dst="torch"), []

    def narrow():
        with autocast("bfloat16"):
            found.append(module(torch.from_numpy(X)).dtype)

    thread = threading.Thread(target=narrow)
    thread.start()
    assert waits.entered.wait(60)
    np.testing.assert_array_equal(module(torch.from_numpy(X)).detach(), model(X))
    waits.go_on.set()
    thread.join(60)
    assert found == [torch.bfloat16]


class Constant(keras.layers.Layer):
    def call(self, x):
        return x * tf.constant(2.0)


def test_a_layer_that_cannot_compute_in_the_policy_says_how_to_go_on():
    module = polybridge.wrap(keras.Sequential([keras.layers.Input((4,)), Constant()]), dst="torch")
    with pytest.raises(Exception, match="bfloat16") as caught, autocast("bfloat16"):
        module(torch.from_numpy(X))
    assert "enabled=False" in "".join(caught.value.__notes__)
    with torch.autocast("cpu", enabled=False):
        np.testing.assert_array_equal(module(torch.from_numpy(X)), 2 * X)


def scaled(params, x):
    return x["x"] * params["w"] + params["b"]


class Scaled(tf.Module):
    def __init__(self, params):
        super().__init__()
        self.w, self.b = tf.Variable(params["w"]), tf.Variable(params["b"])

    def __call__(self, x):
        return x["x"] * self.w + self.b


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("weights", ["float32", "float64"])
@pytest.mark.parametrize("source", ["jax", "tensorflow"])
def test_a_source_without_a_mode_computes_in_its_weights_dtype(source, weights, dtype):
    with jax.enable_x64(True):
        check_without_a_mode(source, weights, dtype)


def check_without_a_mode(source, weights, dtype):
    params = {"w": np.arange(4, dtype=weights) / 3, "b": np.ones(4, weights)}
    if source == "jax":
        held = {name: jnp.asarray(value) for name, value in params.items()}
        module = polybridge.wrap(scaled, src="jax", dst="torch", params=held)
    else:
        module = polybridge.wrap(Scaled(params), dst="torch")
    first = nn.Linear(4, 4)
    with autocast(dtype):
        hidden = first(torch.from_numpy(X))
        hidden.retain_grad()
        out = module({"x": hidden})
    assert hidden.dtype == getattr(torch, dtype) and out.dtype == getattr(torch, weights)
    wide = hidden.detach().to(out.dtype)
    torch.testing.assert_close(out, wide * torch.from_numpy(params["w"]) + 1, rtol=1e-6, atol=1e-7)
    out.sum().backward()
    gradients = {name.rpartition(".")[2]: p.grad for name, p in module.named_parameters()}
    assert {g.dtype for g in gradients.values()} == {out.dtype}
    torch.testing.assert_close(gradients["w"], wide.sum(0))
    torch.testing.assert_close(hidden.grad, torch.from_numpy(params["w"]).to(hidden.dtype).expand(5, 4))
    assert first.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("source", ["jax", "tensorflow", "keras"])
def test_an_overflow_skips_the_step_and_lowers_the_scale(source):
    params = {"w": np.ones(4, "float32"), "b": np.zeros(4, "float32")}
    module = {
        "jax": lambda: polybridge.wrap(scaled, src="jax", dst="torch", params=params),
        "tensorflow": lambda: polybridge.wrap(Scaled(params), dst="torch"),
        "keras": lambda: nn.Sequential(Picked(), polybridge.wrap(keras_models.mlp(), dst="torch")),
    }[source]()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    before = [p.detach().clone() for p in module.parameters()]

    def step(x):
        with autocast("float16"):
            loss = module({"x": x}).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [p.detach().clone() for p in module.parameters()]

    for infinite in (torch.full((5, 4), torch.inf), torch.full((5, 4), torch.nan)):
        after = step(infinite)
        assert all(map(torch.equal, before, after))
    assert scaler.get_scale() == 2.0**8
    after = step(torch.from_numpy(X))
    assert not torch.equal(before[0], after[0]) and all(x.isfinite().all() for x in after)


class Picked(nn.Module):
    def forward(self, x):
        return x["x"]


class Seen(nn.Module):
    """A layer that tells in which dtype it has computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, x):
        out = self.layer(x)
        self.seen.append(out.dtype)
        return out


def test_a_torch_module_inside_of_a_keras_model_has_torchs_own_autocast():
    inner = Seen()
    model = keras.Sequential([keras.layers.Input((4,)), polybridge.wrap(inner, dst="keras"), keras.layers.Dense(2)])
    module = polybridge.wrap(model, dst="torch")
    for _ in range(3):
        with autocast("bfloat16"):
            out = module(torch.from_numpy(X))
        assert out.dtype == torch.bfloat16 and inner.seen.pop() == torch.bfloat16
        out.float().sum().backward()
        assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
        assert module(torch.from_numpy(X)).dtype == torch.float32 and inner.seen.pop() == torch.float32


def test_a_torch_function_inside_of_a_source_without_a_mode_computes_in_the_weights_dtype():
    inner = Seen().requires_grad_(False)
    called = polybridge.wrap(lambda x: inner(x), src="torch", dst="jax")
    module = polybridge.wrap(lambda p, x: called(x) * p["w"], src="jax", dst="torch", params={"w": jnp.ones(4)})
    for _ in range(3):
        with autocast("bfloat16"):
            assert module(torch.from_numpy(X)).dtype == torch.float32
    assert set(inner.seen) == {torch.float32}


def test_a_compiled_module_follows_autocast():
    model = keras_models.mlp()
    eager = polybridge.wrap(model, dst="torch")
    compiled = torch.compile(polybridge.wrap(model, dst="torch"), fullgraph=True, backend="aot_eager")
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = compiled(torch.from_numpy(X)), eager(torch.from_numpy(X))
        assert found.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
        torch.testing.assert_close(found, expected)
        found.float().sum().backward()
    assert {p.grad.dtype for p in eager.parameters()} == {torch.float32}
