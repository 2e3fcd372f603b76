"""Asks that Flax NNX's modules are native elsewhere, and that others' are NNX modules."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from flax import nnx

import polybridge

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype("float32")
Y = RNG.normal(size=(16, 2)).astype("float32")


class Net(nnx.Module):
    """With statistics, dropout and a list of layers."""

    def __init__(self, rate=0.0):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, use_bias=False, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.drop(jnp.tanh(self.norm(self.layers[0](x)))))


class Tied(nnx.Module):
    """One weight in two places."""

    def __init__(self):
        self.down = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.up = self.down

    def __call__(self, x):
        return self.up(jnp.tanh(self.down(x)))


def torch_net(rate=0.0):
    """A net of torch with the same kinds of layers."""
    torch.manual_seed(0)
    first = torch.nn.Linear(3, 4, bias=False)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(4), torch.nn.Dropout(rate), torch.nn.Linear(4, 2))


def values(module):
    """The weights and statistics of an NNX module by path."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)))
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in flat}


def natively_trained(module, steps=5):
    """A module of NNX, trained by NNX."""
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        optimizer.update(module, nnx.grad(lambda m: jnp.square(m(X) - Y).mean())(module))

    for _ in range(steps):
        step(module, optimizer)
    return module


def assert_close(found, expected, tolerance=1e-5):
    """Compare dicts of arrays."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], np.asarray(x), rtol=tolerance, atol=tolerance, err_msg=name)


# As a source.


def test_its_variables_are_parameters_and_buffers_under_readable_names():
    bridged = polybridge.wrap(Net(), dst="torch")
    assert {name for name, _ in bridged.named_parameters()} == {
        "layers.0.kernel",
        "layers.1.kernel",
        "layers.1.bias",
        "norm.scale",
        "norm.bias",
    }
    assert {name for name, _ in bridged.named_buffers()} == {"norm.mean", "norm.var"}


def test_torch_trains_it_as_its_twin():
    module = Net()
    bridged = polybridge.wrap(module, dst="torch")
    optimizer = torch.optim.SGD(bridged.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (bridged(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
        optimizer.step()
    assert_close(values(module), values(Net()), 0)  # until it is told
    assert bridged.sync_to_source() is module
    assert_close(values(module), values(natively_trained(Net())))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_keras_trains_it_as_its_twin(graph):
    module = Net()
    bridged = polybridge.wrap(module, dst="keras")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(bridged.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(bridged(tf.constant(X), training=True) - Y))
        optimizer.apply(tape.gradient(loss, bridged.trainable_variables), bridged.trainable_variables)

    compiled = tf.function(step) if graph else step
    for _ in range(5):
        compiled()
    bridged.sync_to_source()
    assert_close(values(module), values(natively_trained(Net())))


def test_evaluation_is_its_own():
    module = natively_trained(Net(0.5))
    bridged = polybridge.wrap(module, dst="torch").eval()
    out = bridged(torch.from_numpy(X)).detach()
    module.eval()
    np.testing.assert_allclose(out, module(X), rtol=1e-5, atol=1e-6)


def test_one_wrapped_for_evaluation_can_be_trained():
    module = Net(0.5)
    module.eval()
    bridged = polybridge.wrap(module, dst="torch")
    bridged(torch.from_numpy(X))
    assert bridged.norm.mean.any()
    assert module.drop.deterministic  # and is as it was


def test_dropout_follows_torchs_seed_and_leaves_the_streams_alone():
    module = Net(0.5)
    bridged = polybridge.wrap(module, dst="torch")
    torch.manual_seed(1)
    first, second = bridged(torch.from_numpy(X)), bridged(torch.from_numpy(X))
    torch.manual_seed(1)
    assert torch.equal(bridged(torch.from_numpy(X)), first)
    assert not torch.equal(first, second)
    assert module.drop.rngs.count[...] == 0


def test_two_layers_draw_different_masks():
    class Two(nnx.Module):
        def __init__(self):
            self.one, self.two = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.one(x), self.two(x)

    one, two = polybridge.wrap(Two(), dst="torch")(torch.ones(64))
    assert not torch.equal(one, two)


def test_what_the_caller_says_goes_to_arguments_of_that_name():
    class Explicit(nnx.Module):
        def __call__(self, x, *, train, rngs=None):
            return x * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape) if train else x

    bridged = polybridge.wrap(Explicit(), dst="torch")
    torch.manual_seed(0)
    assert set(bridged(torch.ones(64)).tolist()) == {0.0, 1.0}
    assert bridged.eval()(torch.ones(64)).all()


def test_a_tied_weight_is_one_parameter():
    module = Tied()
    bridged = polybridge.wrap(module, dst="torch")
    bridged(torch.from_numpy(X)).sum().backward()
    expected = nnx.grad(lambda m: m(X).sum())(module)
    assert [name for name, _ in bridged.named_parameters()] == ["down.bias", "down.kernel"]
    np.testing.assert_allclose(bridged.down.kernel.grad, expected["down"]["kernel"][...], rtol=1e-5)


def test_a_variable_of_two_modules_is_one_parameter():
    one, two = Tied(), Tied()
    two.down.kernel = one.down.kernel
    first, second = polybridge.wrap(one, dst="torch"), polybridge.wrap(two, dst="torch")
    assert first.down.kernel is second.down.kernel


def test_it_goes_to_jax_and_draws_nothing_there_without_a_key():
    module = Net(0.5)
    apply, params, state = polybridge.wrap(module, dst="jax")
    out, after = jax.jit(apply)(params, state, X)
    assert_close(after, state, 0)
    module.eval()
    np.testing.assert_allclose(out, module(X), rtol=1e-6)
    with pytest.raises(polybridge.RandomnessError, match="`Net` draws random numbers"):
        jax.jit(lambda p: apply(p, state, X, training=True))(params)


# As a destination.


def test_a_module_of_torch_trains_as_its_twin():
    bridged = polybridge.wrap(torch_net(), dst="nnx")
    natively_trained(bridged)
    twin = torch_net()
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (twin(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
        optimizer.step()
    module = bridged.sync_to_source()
    assert_close(module.state_dict(), {name: x.detach() for name, x in twin.state_dict().items()})
    bridged.eval()
    np.testing.assert_allclose(bridged(X), twin.eval()(torch.from_numpy(X)).detach(), rtol=1e-4, atol=1e-5)


def test_its_parts_are_found_by_kind():
    module = torch_net()
    module[3].weight.requires_grad_(False)
    bridged = polybridge.wrap(module, dst="flax")
    names = {
        kind: {path[-1] for path, _ in nnx.to_flat_state(nnx.state(bridged, kind))}
        for kind in (nnx.Param, nnx.BatchStat)
    }
    assert names[nnx.Param] == {"0.weight", "1.weight", "1.bias", "3.bias"}  # and no frozen one
    assert names[nnx.BatchStat] == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_weight_decay_leaves_frozen_weights_alone():
    module = torch_net()
    module[3].weight.requires_grad_(False)
    before = module[3].weight.clone()
    bridged = polybridge.wrap(module, dst="flax")
    optimizer = nnx.Optimizer(bridged, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(bridged, nnx.grad(lambda m: jnp.square(m(X) - Y).mean())(bridged))
    bridged.sync_to_source()
    assert torch.equal(module[3].weight, before)


def test_it_splits_merges_clones_and_is_viewed():
    bridged = polybridge.wrap(torch_net(), dst="flax")
    bridged.eval()
    expected = bridged(X)
    graph, state = nnx.split(bridged)
    merged = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    for other in (merged, nnx.clone(bridged), nnx.view(bridged, deterministic=True)):
        np.testing.assert_array_equal(other(X), expected)
    assert not nnx.view(bridged, deterministic=False).deterministic


def test_it_is_part_of_a_module_of_ones_own():
    class Whole(nnx.Module):
        def __init__(self):
            self.body = polybridge.wrap(torch_net(), dst="flax")
            self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(self.body(x))

    whole = Whole()
    before = values(whole)
    natively_trained(whole, 2)
    assert all((x != before[name]).any() for name, x in values(whole).items())
    assert whole.body.state["1.num_batches_tracked"][...] == 2


@pytest.mark.parametrize("given", ["call", "held", "key", "option"])
def test_its_dropout_follows_the_rngs(given):
    bridged = polybridge.wrap(torch.nn.Dropout(0.5), dst="flax")
    ones = jnp.ones(64)

    def run(seed):
        if given == "call":
            return bridged(ones, rngs=nnx.Rngs(seed))
        if given == "key":
            return bridged(ones, rngs=jax.random.key(seed))
        if given == "option":
            return polybridge.wrap(torch.nn.Dropout(0.5), dst="flax", rngs=nnx.Rngs(seed))(ones)
        bridged.rngs = nnx.Rngs(seed)
        return bridged(ones)

    np.testing.assert_array_equal(run(0), run(0))
    assert (run(0) != run(1)).any()


def test_held_streams_move_on_under_jit():
    bridged = polybridge.wrap(torch.nn.Dropout(0.5), dst="flax")
    bridged.rngs = nnx.Rngs(0)
    run = nnx.jit(lambda m: m(jnp.ones(64)))
    assert (run(bridged) != run(bridged)).any()
    bridged.eval()
    assert run(bridged).all()


def test_without_rngs_dropout_is_an_error():
    bridged = polybridge.wrap(torch.nn.Dropout(0.5), dst="flax")
    with pytest.raises(polybridge.RandomnessError, match="`rngs=` to a module of Flax"):
        nnx.jit(lambda m: m(jnp.ones(64)))(bridged)


def test_two_modules_share_the_variable_of_a_shared_weight():
    one, two = torch_net(), torch_net()
    two[3].weight = one[3].weight
    first, second = polybridge.wrap(one, dst="flax"), polybridge.wrap(two, dst="flax")
    both = nnx.List([first, second])
    grads = nnx.grad(lambda m: jnp.square(m[0](X)).sum() + jnp.square(m[1](X)).sum())(both)
    (one(torch.from_numpy(X)).square().sum() + two(torch.from_numpy(X)).square().sum()).backward()
    np.testing.assert_allclose(grads[0]["params"]["3.weight"][...], one[3].weight.grad, rtol=1e-4)


def test_the_source_gives_its_values_on_request():
    module = torch_net()
    bridged = polybridge.wrap(module, dst="flax")
    with torch.no_grad():
        module[3].bias.fill_(7)
    bridged.sync_from_source()
    np.testing.assert_array_equal(bridged.params["3.bias"][...], [7, 7])


def test_nothing_imports_flax_or_equinox_unless_it_is_asked_for():
    code = """
import sys, torch, jax.numpy as jnp, polybridge
apply, params, state = polybridge.wrap(torch.nn.Linear(2, 2), dst="jax")
apply(params, state, jnp.ones(2))
assert not {"flax", "equinox", "optax", "keras"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_variable_that_a_call_makes_is_refused_and_what_it_sows_is_not():
    class Counts(nnx.Module):
        def __init__(self, sows):
            self.w, self.sows = nnx.Param(jnp.ones(3)), sows

        def __call__(self, x):
            if self.sows:
                self.sow(nnx.Intermediate, "seen", x)
            elif not hasattr(self, "calls"):
                self.calls = nnx.Variable(jnp.zeros(()))  # which would be made again at each call
            return x * self.w[...]

    module = polybridge.wrap(Counts(sows=False), dst="torch")
    for _ in range(2):
        with pytest.raises(polybridge.MutationError, match="calls"):
            module(torch.ones(3))
    module = polybridge.wrap(Counts(sows=True), dst="torch")
    for _ in range(2):
        assert torch.equal(module(torch.ones(3)), torch.ones(3))
