"""Asks of a torch module that was wrapped for TensorFlow that it is a `tf.Module`."""

import copy

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

import polybridge
from polybridge.observe import count_crossings
from tests.modules.nets import LazyPair, Net, scaled_pair

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((8, 4)).astype("float32")


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "tf.function"])
def test_the_specs_of_the_result_suffice_where_a_module_cannot_be_traced(staged):
    """A result whose values decide what is computed, and statistics that change all the same."""

    class Choosing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            return y * 2 if x.sum().item() > 0 else y * 3

    net, native = Choosing(), Choosing()
    module = polybridge.wrap(net, dst="tf", output_specs=polybridge.TensorSpec((4, 3), "float32"))
    step = lambda x: module(x, training=True)  # noqa: E731
    step = tf.function(step) if staged else step
    for sign in (1, -1):
        x = sign * np.arange(12, dtype="float32").reshape(4, 3)
        np.testing.assert_allclose(step(tf.constant(x)), native(torch.from_numpy(x)).detach(), rtol=1e-6)
    np.testing.assert_allclose(module.state["norm.running_mean"], native.norm.running_mean, rtol=1e-6)


def test_variables_are_weights_and_state():
    module = Net()
    module.body[0].weight.requires_grad_(False)
    bridged = polybridge.wrap(module, dst="tf")
    assert isinstance(bridged, tf.Module) and bridged.name == "Net"
    trained = {v.name for v in bridged.trainable_variables}
    assert {f"Net/body/{name}:0" for name in ("0/bias", "1/weight", "1/bias", "4/weight", "4/bias")} == trained
    assert len(bridged.variables) == 9 and bridged.state["body.1.num_batches_tracked"].dtype == tf.int64


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_training_is_that_of_torch(graph):
    torch.manual_seed(0)
    module = Net(dropout=0.0)
    twin = copy.deepcopy(module)
    bridged = polybridge.wrap(module, dst="tf")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(bridged(x, training=True) ** 2)
        for v, g in zip(bridged.trainable_variables, tape.gradient(loss, bridged.trainable_variables), strict=True):
            v.assign_sub(0.1 * g)

    step = tf.function(step) if graph else step
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(5):
        step(tf.constant(X))
        optimizer.zero_grad()
        twin(torch.from_numpy(X)).square().mean().backward()
        optimizer.step()
    assert bridged.sync_to_source() is module
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor(bridged(X).numpy()), twin.eval()(torch.from_numpy(X)).detach(), rtol=1e-5, atol=1e-6
    )


def test_synchronising_moves_every_bit_both_ways():
    module = Net()
    bridged = polybridge.wrap(module, dst="tf")
    for v in bridged.variables:
        v.assign(tf.cast(RANDOM.standard_normal(v.shape), v.dtype))
    bridged.sync_to_source()
    for name, value in module.state_dict().items():
        assert value.numpy().tobytes() == {**bridged.params, **bridged.state}[name].numpy().tobytes()
    with torch.no_grad():
        module.body[0].weight.fill_(1.5)
    bridged.sync_from_source()
    assert (bridged.params["body.0.weight"].numpy() == 1.5).all()


def test_a_copy_has_weights_of_its_own():
    bridged = polybridge.wrap(nn.Linear(4, 2), dst="tf")
    before = bridged(X).numpy()
    average = copy.deepcopy(bridged)
    bridged.params["weight"].assign(tf.zeros([2, 4]))
    assert np.array_equal(average(X), before) and not np.array_equal(bridged(X), before)


def test_a_checkpoint_restores_weights_and_state(tmp_path):
    bridged = polybridge.wrap(Net(), dst="tf")
    bridged(X, training=True)
    path = tf.train.Checkpoint(model=bridged).save(str(tmp_path / "model"))
    other = polybridge.wrap(Net(), dst="tf")
    tf.train.Checkpoint(model=other).restore(path).assert_consumed()
    for name, v in {**bridged.params, **bridged.state}.items():
        assert np.array_equal(v.numpy(), {**other.params, **other.state}[name].numpy())


def test_a_saved_model_cannot_hold_the_call(tmp_path):
    bridged = polybridge.wrap(Net(), dst="tf")
    bridged.serve = tf.function(lambda x: bridged(x), input_signature=[tf.TensorSpec([None, 4])])
    with pytest.raises(ValueError, match="tracing gradients"):
        tf.saved_model.save(bridged, str(tmp_path))
    error = polybridge.last_error()
    assert isinstance(error, polybridge.CompilationError) and "SavedModel cannot hold it" in str(error)


def test_xla_cannot_hold_the_call():
    bridged = polybridge.wrap(nn.Linear(4, 2), dst="tf")
    with pytest.raises(polybridge.CompilationError, match="XLA"):
        tf.function(bridged, jit_compile=True)(tf.constant(X))


def test_jacobians_and_forward_mode_reach_the_weights():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    bridged = polybridge.wrap(module, dst="tf")
    weight = bridged.params["0.weight"]
    start, x = module[0].weight.detach(), torch.from_numpy(X)

    def native(w):
        return torch.func.functional_call(module, {"0.weight": w}, x)

    with tf.GradientTape() as tape:
        out = bridged(X)
    np.testing.assert_allclose(tape.jacobian(out, weight), torch.func.jacrev(native)(start).detach(), 1e-5, 1e-6)
    tangent = RANDOM.standard_normal((3, 4)).astype("float32")
    with tf.autodiff.ForwardAccumulator(weight, tf.constant(tangent)) as accumulator:
        out = bridged(X)
    expected = torch.func.jvp(native, (start,), (torch.from_numpy(tangent),))[1].detach()
    np.testing.assert_allclose(accumulator.jvp(out), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_dropout_follows_the_seed_and_its_gradient_has_the_same_mask(graph):
    bridged = polybridge.wrap(nn.Dropout(0.5), dst="tf")

    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = bridged(x, training=True)
        return out, tape.gradient(out, x)

    call = tf.function(call) if graph else call
    ones = tf.ones([200])
    call(ones)
    tf.random.set_seed(1)
    masks = [call(ones)[0].numpy() for _ in range(2)]
    assert not np.array_equal(*masks)
    tf.random.set_seed(1)
    out, gradient = call(ones)
    assert np.array_equal(out, masks[0]) and np.array_equal(gradient, out)


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_drawn_for_a_module_that_draws_nothing(training):
    bridged = polybridge.wrap(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), dst="tf")
    tf.random.set_seed(1)
    expected = tf.random.uniform([3])
    tf.random.set_seed(1)
    bridged(X, training=training)
    assert np.array_equal(tf.random.uniform([3]), expected)


def test_a_module_that_samples_in_evaluation_follows_the_seed():
    class Sampling(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    bridged = polybridge.wrap(Sampling(), dst="tf")
    found = []
    for seed in (1, 1, 2):
        tf.random.set_seed(seed)
        found.append(bridged(X).numpy())
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_no_weight_is_copied_for_a_call(graph):
    bridged = polybridge.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), dst="tf")
    x = tf.constant(X)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(bridged(x, training=True))
        return tape.gradient(loss, bridged.trainable_variables)

    step = tf.function(step) if graph else step
    for _ in range(4):
        step()
    with count_crossings() as counted:
        step()
    assert counted.copies == 0 and counted.crossings >= 11  # five inputs, a result, its cotangent and four gradients


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_lazy_module_gets_its_variables_at_the_first_call(graph):
    torch.manual_seed(0)
    module = LazyPair()
    bridged = polybridge.wrap(module, dst="tf")
    other = polybridge.wrap(module, dst="tf")
    call = tf.function(bridged) if graph else bridged
    out = call(X, right=X[:, :2], training=True)
    assert bridged.params["left.weight"].shape == (3, 4) and bridged.params["right.weight"].shape == (3, 2)
    assert len(bridged.trainable_variables) == 6 and bridged.state["norm.num_batches_tracked"].numpy() == 1
    np.testing.assert_allclose(out, module(torch.from_numpy(X), torch.from_numpy(X[:, :2])).detach(), 1e-5, 1e-6)
    other(X, X[:, :2])
    assert other.params["left.weight"] is bridged.params["left.weight"]


def test_a_jax_function_and_its_weights():
    fn, params, state = scaled_pair()
    bridged = polybridge.wrap(fn, src="jax", dst="tf", params=params, state=state)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bridged(X, training=True))
    gradient = tape.gradient(loss, bridged.params)
    np.testing.assert_allclose(gradient["w"], np.repeat(X.sum(0)[:, None], 2, 1), 1e-5)
    assert bridged.state["steps"].numpy() == 1
    bridged.params["b"].assign([3.0, 4.0])
    trained, counted = bridged.sync_to_source()
    assert trained["b"].tolist() == [3.0, 4.0] and counted["steps"] == 1


def test_it_says_what_it_bridges():
    assert repr(polybridge.wrap(nn.Linear(2, 2), dst="tf")) == "BridgedModule(Linear, src='torch')"


def test_options_are_for_modules_that_take_them():
    assert polybridge.wrap(nn.Linear(2, 2), dst="tf", name="head").name == "head"
    with pytest.raises(TypeError, match=r"takes name= for modules only"):
        polybridge.wrap(lambda x: x, src="torch", dst="tf", name="head")
