"""Asks of models with bridged layers that Keras saves, loads and clones them, with a factory that builds the source."""

import copy
import functools
import os
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from torch import nn

import polybridge
from tests.modules.nets import LazyPair, Net, scaled_pair

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((8, 4)).astype("float32")
Y = RANDOM.standard_normal((8, 2)).astype("float32")

LOAD = """
import sys
import numpy as np
from torch import nn
import polybridge, polybridge.keras, keras
polybridge.register_factory("tests.linear", lambda: nn.Linear(4, 2))
x = np.load("x.npy")
for name, safe in (("imported", False), ("registered", True)):
    model = keras.models.load_model(f"{name}.keras", safe_mode=safe)
    np.save(f"{name}.npy", model.predict(x, verbose=0))
    model.fit(x, x[:, :2], verbose=0)
"""


def fitted(layer, inputs, outputs=2):
    symbols = [keras.Input(x.shape[1:]) for x in inputs]
    model = keras.Model(symbols, layer(*symbols))
    model.compile("adam", "mse")
    model.fit(inputs, RANDOM.random((8, outputs)), verbose=0)
    return model


def test_another_process_loads_a_model_and_trains_on(tmp_path):
    imported = functools.partial(Net, 5, dropout=0.25)
    registered = polybridge.register_factory("tests.linear", lambda: nn.Linear(4, 2))
    expected = {}
    for name, factory in (("imported", imported), ("registered", registered)):
        model = fitted(polybridge.wrap(factory(), dst="keras", factory=factory, name="net"), [X])
        model.save(tmp_path / f"{name}.keras")
        expected[name] = model.predict(X, verbose=0)
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", LOAD]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, values in expected.items():
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), values)


CASES = {
    "lazy": (lambda: polybridge.wrap(LazyPair(), dst="keras", factory=LazyPair), [X, Y], 3),
    "jax": (
        lambda: polybridge.wrap(
            scaled_pair()[0],
            src="jax",
            dst="keras",
            params=scaled_pair()[1],
            state=scaled_pair()[2],
            factory=scaled_pair,
        ),
        [X],
        2,
    ),
    "frozen, in half precision": (
        lambda: polybridge.wrap(Net(), dst="keras", factory=Net, dtype="mixed_bfloat16", trainable=False, copy=True),
        [X],
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_the_saved_one(case, tmp_path):
    make, inputs, outputs = CASES[case]
    model = fitted(make(), inputs, outputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    one, other = model.layers[-1], loaded.layers[-1]
    assert (other.name, other.dtype_policy.name, other.trainable) == (one.name, one.dtype_policy.name, one.trainable)
    assert list(other.params) == list(one.params) and list(other.state) == list(one.state)
    for name, value in {**one.params, **one.state}.items():
        assert np.array_equal(value.numpy(), {**other.params, **other.state}[name].numpy())
    assert np.array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))


def test_a_clone_has_weights_of_its_own():
    model = fitted(polybridge.wrap(Net(), dst="keras", factory=Net), [X])
    for other in (keras.models.clone_model(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.set_weights(model.get_weights())
        assert np.array_equal(other(X), model(X))
        assert other.layers[-1].params["body.0.weight"] is not model.layers[-1].params["body.0.weight"]


def test_without_a_factory_saving_says_what_to_do(tmp_path):
    model = fitted(polybridge.wrap(Net(), dst="keras"), [X])
    with pytest.raises(polybridge.FactoryError, match=r"`Net` cannot be saved by itself.*factory=make_model"):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")


def test_a_factory_that_no_name_finds_is_refused_when_saving(tmp_path):
    model = fitted(polybridge.wrap(Net(), dst="keras", factory=lambda: Net()), [X])
    with pytest.raises(polybridge.FactoryError, match="no import finds it"):
        model.save(tmp_path / "model.keras")


def test_the_safe_mode_imports_nothing_that_a_file_names(tmp_path):
    model = fitted(polybridge.wrap(Net(), dst="keras", factory=Net), [X])
    model.save(tmp_path / "model.keras")
    with pytest.raises(Exception, match=r"would be imported and called.*safe_mode=False"):
        keras.models.load_model(tmp_path / "model.keras")
