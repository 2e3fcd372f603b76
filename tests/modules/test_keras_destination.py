"""Asks of a torch module that was wrapped for Keras that it is a layer, in every kind of model."""

import copy
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import polybridge
from polybridge.observe import count_crossings
from tests.modules.nets import LazyPair, Net, scaled_pair

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 4)).astype("float32")
Y = RANDOM.standard_normal((16, 2)).astype("float32")


class Subclassed(keras.Model):
    def __init__(self, modules):
        super().__init__()
        self.parts = [polybridge.wrap(m, dst="keras") for m in modules]
        self.head = keras.layers.Dense(2)

    def call(self, x, training=None):  # without this argument, Keras trains nothing in it as in training
        for part in self.parts:
            x = part(x)
        return self.head(x)


def sequential(module):
    return keras.Sequential([polybridge.wrap(module, dst="keras"), keras.layers.Dense(2)])


def functional(module):
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(2)(polybridge.wrap(module, dst="keras")(x)))


def subclassed(module):
    return Subclassed([module, nn.Linear(2, 2)])


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("make", [sequential, functional, subclassed])
def test_models_fit_evaluate_and_predict(make, eagerly, tmp_path):
    model = make(Net())
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=eagerly)
    callbacks = [
        keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.weights.h5"), save_weights_only=True),
    ]
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    history = model.fit(data, epochs=2, validation_data=(X, Y), callbacks=callbacks, verbose=0).history
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], np.mean((model.predict(X, verbose=0) - Y) ** 2), 1e-4)
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert "net" in "\n".join(lines)
    (layer,) = [x for x in model._flatten_layers() if x.name.startswith("net")]
    assert layer.state["body.1.num_batches_tracked"].numpy() == 2 * (callbacks[0].best_epoch + 1)


def test_training_is_that_of_torch():
    torch.manual_seed(0)
    module = Net(dropout=0.0)
    twin = copy.deepcopy(module)
    before = copy.deepcopy(module.state_dict())
    layer = polybridge.wrap(module, dst="keras")
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.SGD(0.125), "mse")
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    optimizer = torch.optim.SGD(twin.parameters(), 0.125)
    for start in [0, 4, 8, 12] * 2:
        optimizer.zero_grad()
        x, y = (torch.from_numpy(a[start : start + 4]) for a in (X, Y))
        nn.functional.mse_loss(twin(x), y).backward()
        optimizer.step()
    assert layer.sync_to_source() is module
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    for name, value in {**layer.params, **layer.state}.items():
        assert module.state_dict()[name].numpy().tobytes() == value.numpy().tobytes()
    np.testing.assert_allclose(
        model.predict(X, verbose=0), twin.eval()(torch.from_numpy(X)).detach(), rtol=1e-4, atol=1e-5
    )


def test_variables_have_the_sources_names_under_the_layers():
    layer = polybridge.wrap(nn.Linear(4, 2), dst="keras", name="head")
    assert layer.name == "head"
    assert [(v.path, v.name) for v in layer.weights] == [("head/weight", "weight"), ("head/bias", "bias")]
    names = [polybridge.wrap(Net(), dst="keras").name for _ in range(2)]
    assert names[0] != names[1] and all(name.startswith("net") for name in names)


def test_weights_are_got_set_saved_and_loaded(tmp_path):
    model, other = (keras.Sequential([keras.Input((4,)), polybridge.wrap(Net(), dst="keras")]) for _ in range(2))
    model.set_weights([RANDOM.random(w.shape).astype(w.dtype) for w in model.get_weights()])
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert all(itertools.starmap(np.array_equal, zip(model.get_weights(), other.get_weights(), strict=True)))
    assert np.array_equal(model(X), other(X))
    assert model.count_params() == sum(x.numel() for x in Net().state_dict().values())


def test_a_checkpoint_of_tensorflow_finds_the_variables(tmp_path):
    model = keras.Sequential([keras.Input((4,)), polybridge.wrap(Net(), dst="keras")])
    before = model.get_weights()
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(str(tmp_path / "model"))
    model.set_weights([w + 1 for w in before])
    checkpoint.restore(path)
    assert all(itertools.starmap(np.array_equal, zip(model.get_weights(), before, strict=True)))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y=None, *, scale=1.0, mask=None):
        out = self.linear(x) * scale
        return {"out": out if mask is None else out * mask, "both": (x, x if y is None else x + y)}


def test_several_inputs_and_outputs_and_keyword_arguments():
    module = Several()
    layer = polybridge.wrap(module, dst="keras")
    x, y, mask = keras.Input((4,)), keras.Input((4,)), keras.Input((3,))
    out = layer(x, y=y, scale=2.0, mask=mask)
    assert {name: keras.tree.map_structure(lambda t: t.shape, v) for name, v in out.items()} == {
        "out": (None, 3),
        "both": ((None, 4), (None, 4)),
    }
    ones = np.ones((16, 3), "float32")
    found = keras.Model([x, y, mask], out)([X, 2 * X, ones])
    np.testing.assert_allclose(found["out"], 2 * module.linear(torch.from_numpy(X)).detach(), 1e-5, 1e-6)
    np.testing.assert_allclose(found["both"][1], 3 * X, 1e-6)
    np.testing.assert_allclose(layer(X, scale=2.0)["out"], found["out"], 1e-6)


def test_shapes_are_known_before_a_call():
    layer = polybridge.wrap(nn.Conv2d(3, 8, 3, stride=2, padding=1), dst="keras")
    assert layer(keras.Input((3, None, None))).shape == (None, 8, None, None)
    assert layer.compute_output_shape((None, 3, 32, 32)) == (None, 8, 16, 16)

    class Positions(nn.Module):
        def forward(self, x):
            return x.argmax(1), x.sum(1)

    positions, _ = polybridge.wrap(Positions(), dst="keras")(keras.Input((5,)))
    assert (positions.shape, positions.dtype) == ((None,), "int64")


def test_a_mask_that_nobody_takes_is_warned_of():
    embedded = keras.layers.Embedding(10, 4, mask_zero=True)(np.array([[1, 2, 0]]))
    with pytest.warns(UserWarning, match="destroy the mask"):
        polybridge.wrap(nn.Linear(4, 4), dst="keras")(embedded)


def test_frozen_weights_and_layers():
    module = Net()
    module.body[0].weight.requires_grad_(False)
    layer = polybridge.wrap(module, dst="keras")
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(2)])
    assert len(model.trainable_variables) == 5 + 2
    layer.trainable = False
    assert len(model.trainable_variables) == 2
    before = layer.get_weights()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    assert all(itertools.starmap(np.array_equal, zip(layer.get_weights(), before, strict=True)))
    layer.trainable = True
    assert len(model.trainable_variables) == 5 + 2 and not layer.params["body.0.weight"].trainable


@pytest.mark.parametrize("eagerly", [True, False])
def test_weights_that_the_source_froze_can_be_trained_later(eagerly):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).requires_grad_(False)
    module[2].requires_grad_(True)
    layer = polybridge.wrap(module, dst="keras")
    model = keras.Sequential([keras.Input((4,)), layer])
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
    model.fit(x, y, batch_size=8, verbose=0)
    for variable in layer.params.values():
        variable.trainable = True
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
    model.fit(x, y, batch_size=8, verbose=0)

    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for epoch in range(2):
        module.requires_grad_(True) if epoch else None
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(layer.params[name].numpy(), parameter.detach(), rtol=1e-4, atol=1e-6)


def test_a_module_that_two_layers_share_gets_the_sum_of_gradients():
    module = nn.Linear(4, 4)
    inner = nn.Sequential(module, nn.Tanh())
    layers = [polybridge.wrap(m, dst="keras") for m in (module, module, inner)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    assert len(model.trainable_variables) == 2 and model.count_params() == 20
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X) ** 2)
    inner(module(module(torch.from_numpy(X)))).square().sum().backward()
    weight, bias = tape.gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(weight, module.weight.grad, 1e-4, 1e-5)
    np.testing.assert_allclose(bias, module.bias.grad, 1e-4, 1e-5)


def test_a_train_step_of_ones_own():
    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = polybridge.wrap(Net(), dst="keras")

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Custom()
    model.compile("adam")
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert model.net.state["body.1.num_batches_tracked"].numpy() == 8


def trained(seed, **options):
    keras.utils.set_random_seed(seed)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = keras.Input((4,))
    branches = [polybridge.wrap(copy.deepcopy(module), dst="keras")(x) for _ in range(2)]
    model = keras.Model(x, keras.layers.add(branches))
    model.compile("sgd", "mse", **options)
    generator = torch.get_rng_state()
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert torch.equal(torch.get_rng_state(), generator)
    return model.get_weights()


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_dropout_in_fit_follows_keras_seed(eagerly):
    one, again, other = (trained(seed, run_eagerly=eagerly) for seed in (1, 1, 2))
    assert all(itertools.starmap(np.array_equal, zip(one, again, strict=True)))
    assert not np.array_equal(one[0], other[0])
    assert not np.array_equal(one[0], one[4])  # the branches started alike, and have masks of their own


def test_evaluation_does_not_change_how_training_goes_on():
    found = []
    for evaluates in (False, True):
        keras.utils.set_random_seed(1)
        layer = polybridge.wrap(nn.Dropout(0.5), dst="keras")
        if evaluates:
            assert np.array_equal(layer(X, training=False), X)
        found.append(layer(X, training=True).numpy())
    assert np.array_equal(*found)


def test_xla_is_left_out_by_keras_and_refused_by_us():
    model = keras.Sequential([polybridge.wrap(nn.Linear(4, 2), dst="keras")])
    model.compile("sgd", "mse")
    assert model.jit_compile is False
    with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(X, Y, verbose=0)
    with pytest.raises(polybridge.CompilationError, match="XLA"):
        tf.function(model, jit_compile=True)(tf.constant(X))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_no_weight_is_copied_for_a_call(graph):
    layer = polybridge.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), dst="keras")
    x = tf.constant(X)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(loss, layer.trainable_variables)

    step = tf.function(step) if graph else step
    for _ in range(4):
        step()
    with count_crossings() as counted:
        step()
    assert counted.copies == 0 and counted.crossings >= 11


def test_a_lazy_module_is_built_by_a_model():
    left, right = keras.Input((4,)), keras.Input((2,))
    layer = polybridge.wrap(LazyPair(), dst="keras")
    assert not layer.built and not layer.weights
    model = keras.Model([left, right], layer(left, right))
    assert layer.built and layer.params["right.weight"].shape == (3, 2) and len(model.trainable_variables) == 6
    model.compile("adam", "mse")
    model.fit([X, Y], np.zeros((16, 3)), verbose=0)
    assert layer.state["norm.num_batches_tracked"].numpy() == 1


@pytest.mark.parametrize("make", [sequential, subclassed])
def test_a_lazy_module_is_built_when_a_model_is_fitted(make):
    model = make(nn.LazyLinear(2))
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    (layer,) = [x for x in model._flatten_layers() if "lazy" in x.name]
    assert layer.params["weight"].shape == (2, 4)


def test_a_lazy_module_is_built_for_a_shape():
    layer = polybridge.wrap(nn.LazyLinear(2), dst="keras")
    layer.build((None, 4))
    assert layer.params["weight"].shape == (2, 4) and layer.count_params() == 10


def test_a_jax_function_and_its_weights():
    fn, params, state = scaled_pair()
    layer = polybridge.wrap(fn, src="jax", dst="keras", params=params, state=state)
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert layer.state["steps"].numpy() == 4
    w, b = np.ones((4, 2)), np.zeros(2)
    for start in (0, 8, 0, 8):
        x, error = X[start : start + 8], X[start : start + 8] @ w + b - Y[start : start + 8]
        w, b = w - 0.5 * x.T @ error / 8, b - 0.5 * error.mean(0)
    np.testing.assert_allclose(layer.params["w"], w, 1e-4, 1e-5)
    trained_params, counted = layer.sync_to_source()
    assert np.array_equal(trained_params["b"], layer.params["b"]) and counted["steps"] == 4
