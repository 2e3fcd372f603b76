"""Asks that Equinox's modules are native elsewhere, and that others' are Equinox modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import polybridge

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype("float32")
Y = RNG.normal(size=(16, 2)).astype("float32")


class Net(eqx.Module):
    """A batch through layers for one example, with statistics and dropout."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, rate=0.0):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(3, 4, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.drop, self.last = eqx.nn.Dropout(rate), eqx.nn.Linear(4, 2, key=keys[1])

    def __call__(self, x, state, *, key=None):
        def one(x, state, key):
            y, state = self.norm(self.first(x), state)
            return self.last(self.drop(jnp.tanh(y), key=key)), state

        keys, axis = (None, None) if key is None else (jax.random.split(key, len(x)), 0)
        return jax.vmap(one, axis_name="batch", in_axes=(0, None, axis), out_axes=(0, None))(x, state, keys)


def natively_trained(model, state, steps=5):
    """A module with state, trained as Equinox's are."""
    optimizer = optax.sgd(0.1)
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, moments):
        def loss(model, state):
            out, state = model(X, state, key=jax.random.key(0))
            return jnp.square(out - Y).mean(), state

        grads, state = eqx.filter_grad(loss, has_aux=True)(model, state)
        updates, moments = optimizer.update(grads, moments)
        return eqx.apply_updates(model, updates), state, moments

    for _ in range(steps):
        model, state, moments = step(model, state, moments)
    return model, state


def assert_same_trees(found, expected, tolerance=1e-5):
    """Compare trees."""
    found, expected = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (found, expected))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def torch_net(rate=0.0):
    """A net of torch with the same kinds of layers."""
    torch.manual_seed(0)
    first = torch.nn.Linear(3, 4, bias=False)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(4), torch.nn.Dropout(rate), torch.nn.Linear(4, 2))


# As a source.


def test_its_arrays_are_parameters_and_buffers_under_readable_names():
    bridged = polybridge.wrap(Net(), dst="torch")
    names = [name for name, _ in bridged.named_parameters()]
    assert names == ["first.weight", "norm.weight", "norm.bias", "last.weight", "last.bias"]
    buffers = [name for name, _ in bridged.named_buffers()]
    assert buffers == ["norm.batch_counter", "norm.batch_state_index.0", "norm.batch_state_index.1"]


@pytest.mark.parametrize("apart", [False, True], ids=["with its first state", "with a state"])
def test_torch_trains_it_as_its_twin(apart):
    model, state = eqx.nn.make_with_state(Net)()
    bridged = polybridge.wrap(model, state=state, dst="torch") if apart else polybridge.wrap(Net(), dst="torch")
    optimizer = torch.optim.SGD(bridged.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (bridged(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
        optimizer.step()
    found, found_state = bridged.sync_to_source()
    expected, expected_state = natively_trained(model, state)
    assert_same_trees(found, expected)
    assert_same_trees(found_state, expected_state)
    inferring = eqx.nn.inference_mode(expected)
    out = bridged.eval()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(out, inferring(X, expected_state)[0], rtol=1e-4, atol=1e-5)
    found(X, found_state)  # it is a module as before


def test_dropout_follows_torchs_seed():
    bridged = polybridge.wrap(Net(0.5), dst="torch")
    torch.manual_seed(1)
    first, second = bridged(torch.from_numpy(X)), bridged(torch.from_numpy(X))
    torch.manual_seed(1)
    assert torch.equal(bridged(torch.from_numpy(X)), first)
    assert not torch.equal(first, second)


def test_a_module_for_one_example_stays_one():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    bridged = polybridge.wrap(model, dst="torch")
    np.testing.assert_allclose(bridged(torch.from_numpy(X[0])).detach(), model(X[0]), rtol=1e-5)
    mapped = torch.func.vmap(bridged, randomness="different")(torch.from_numpy(X))  # it takes a key
    np.testing.assert_allclose(mapped.detach(), jax.vmap(model)(X), rtol=1e-5)


def test_a_function_of_it_takes_it_as_params():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    bridged = polybridge.wrap(lambda m, x: jax.vmap(m)(x), src="jax", dst="torch", params=model)
    bridged(torch.from_numpy(X)).sum().backward()
    expected = eqx.filter_grad(lambda m: jax.vmap(m)(X).sum())(model)
    np.testing.assert_allclose(bridged.layers.get_parameter("0.weight").grad, expected.layers[0].weight, rtol=1e-5)
    synced = bridged.sync_to_source()
    np.testing.assert_array_equal(jax.vmap(synced)(X), jax.vmap(model)(X))


def test_keras_has_its_gradients():
    import tensorflow as tf

    bridged = polybridge.wrap(eqx.filter_vmap(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))), dst="keras")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bridged(tf.constant(X)))
    grads = tape.gradient(loss, bridged.trainable_variables)
    expected = eqx.filter_grad(lambda m: jax.vmap(m)(X).sum())(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)))
    for found, x in zip(grads, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)


# As a destination.


@pytest.fixture
def bridged():
    """A model and its state."""
    return eqx.nn.make_with_state(polybridge.wrap)(torch_net(), dst="equinox")


def test_a_module_of_torch_trains_as_its_twin(bridged):
    model, state = natively_trained(*bridged)
    twin = torch_net()
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (twin(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
        optimizer.step()
    found = model.sync_to_source(state).state_dict()
    for name, x in twin.state_dict().items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    inferring = eqx.nn.inference_mode(model)
    out, _ = inferring(X, state)
    np.testing.assert_allclose(out, twin.eval()(torch.from_numpy(X)).detach(), rtol=1e-4, atol=1e-5)


def test_what_is_a_leaf_is_what_is_trained(bridged):
    model, state = bridged
    assert set(model.params) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert len(jax.tree.leaves(eqx.filter(model, eqx.is_array))) == 5
    module = torch_net()
    module[3].requires_grad_(False)
    model, state = eqx.nn.make_with_state(polybridge.wrap)(module, dst="eqx")
    assert set(model.params) == {"0.weight", "1.weight", "1.bias"}
    assert set(state.get(model.index)) >= {"3.weight", "3.bias"}


def test_one_without_state_is_called_without():
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 2)
    model = polybridge.wrap(linear, dst="equinox")
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: m(X).sum()))(model)
    linear(torch.from_numpy(X)).sum().backward()
    np.testing.assert_allclose(grads.params["weight"], linear.weight.grad, rtol=1e-5)
    assert not model.is_stateful()


def test_one_with_state_says_so(bridged):
    with pytest.raises(polybridge.WeightsError, match=r"`Sequential` has state.*`model\(x, state\)`"):
        bridged[0](X)


def test_it_is_a_layer_of_sequential():
    def whole():
        body = polybridge.wrap(torch_net(), dst="equinox")
        tail = polybridge.wrap(torch.nn.Tanh(), dst="equinox")
        return eqx.nn.Sequential([body, eqx.nn.Lambda(lambda x: 2 * x), tail])

    model, state = eqx.nn.make_with_state(whole)()
    out, _ = eqx.filter_jit(model)(X, state)
    expected = torch.tanh(2 * torch_net()(torch.from_numpy(X)))
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_its_dropout_follows_the_key(compiled):
    model = polybridge.wrap(torch.nn.Dropout(0.5), dst="equinox")
    run = (
        eqx.filter_jit(lambda m, key: m(jnp.ones(64), key=key)) if compiled else lambda m, key: m(jnp.ones(64), key=key)
    )
    np.testing.assert_array_equal(run(model, jax.random.key(0)), run(model, jax.random.PRNGKey(0)))
    assert (run(model, jax.random.key(0)) != run(model, jax.random.key(1))).any()
    assert run(eqx.nn.inference_mode(model), None).all()
    with pytest.raises(polybridge.RandomnessError, match="`key=` to one of Equinox"):
        run(model, None)


def test_it_is_saved_and_loaded_by_leaves(bridged, tmp_path):
    trained = natively_trained(*bridged)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", trained)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", bridged)
    assert_same_trees(loaded, trained, 0)


def test_the_source_gives_its_values_on_request():
    module = torch.nn.Linear(3, 2)
    model = polybridge.wrap(module, dst="equinox")
    with torch.no_grad():
        module.bias.fill_(7)
    np.testing.assert_array_equal(model.sync_from_source().params["bias"], [7, 7])
