"""Asks that a function of JAX with its trees of parameters and state is a module elsewhere."""

import dataclasses
from typing import NamedTuple

import flax.linen
import flax.struct
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch

import polybridge

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = RNG.normal(size=(8, 2)).astype("float32")
W = RNG.normal(size=(3, 2)).astype("float32")


def apply(params, state, x, *, training=False, rng=None):
    """A layer with a running mean and a count, and with noise that is added where there is a key."""
    y = x @ params["linear"]["w"] + params["linear"]["b"]
    if training:
        mean = 0.9 * state["mean"] + 0.1 * y.mean(0)
        state = {"mean": mean, "count": state["count"] + 1}
    y = y - jax.lax.stop_gradient(state["mean"])
    return y, state


def noisy(params, x, *, training=False, rng=None):
    """Dropout of the weights."""
    kept = jax.random.bernoulli(rng, 0.5, params["w"].shape) if training else 1
    return x * (params["w"] * kept)


def parameters():
    """The first trees."""
    params = {"linear": {"w": jnp.asarray(W), "b": jnp.zeros(2)}}
    return params, {"mean": jnp.zeros(2), "count": jnp.zeros((), "int32")}


def natively_trained(steps=5):
    """Parameters and state that JAX has trained."""
    params, state = parameters()
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params, state):
        def loss(params):
            out, after = apply(params, state, X, training=True)
            return jnp.square(out - Y).mean(), after

        grads, after = jax.grad(loss, has_aux=True)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return optax.apply_updates(params, updates), after

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def assert_same_trees(found, expected, tolerance=1e-5):
    """Compare trees."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(x, str):
            assert x == y
            continue
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-6)


def wrapped(fn, dst, params, state=None):
    """A module of another framework."""
    return polybridge.wrap(fn, src="jax", dst=dst, params=params, state=state)


def test_torch_trains_it_as_jax_does():
    params, state = parameters()
    bridged = wrapped(apply, "torch", params, state)
    assert {name for name, _ in bridged.named_parameters()} == {"linear.w", "linear.b"}
    assert {name for name, _ in bridged.named_buffers()} == {"mean", "count"}
    optimizer = torch.optim.SGD(bridged.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (bridged(torch.from_numpy(X)) - torch.from_numpy(Y)).square().mean().backward()
        optimizer.step()
    synced = bridged.sync_to_source()
    assert_same_trees(synced, natively_trained())
    assert bridged.get_buffer("count") == 5
    out = bridged.eval()(torch.from_numpy(X)).detach()
    np.testing.assert_allclose(out, apply(*synced, X)[0], rtol=1e-5, atol=1e-6)
    assert_same_trees(parameters(), (params, state))  # the caller's trees are as they were


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_keras_trains_it_as_jax_does(graph):
    bridged = wrapped(apply, "keras", *parameters())

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(bridged(tf.constant(X), training=True) - Y))
        for v, g in zip(bridged.trainable_variables, tape.gradient(loss, bridged.trainable_variables), strict=True):
            v.assign_sub(0.1 * g)

    compiled = tf.function(step) if graph else step
    for _ in range(5):
        compiled()
    assert_same_trees(bridged.sync_to_source(), natively_trained())


def test_its_key_follows_from_torchs_seed():
    bridged = wrapped(noisy, "torch", {"w": jnp.ones(64)})
    torch.manual_seed(1)
    first, second = bridged(torch.ones(64)), bridged(torch.ones(64))
    torch.manual_seed(1)
    again = bridged(torch.ones(64))
    assert torch.equal(first, again) and not torch.equal(first, second)
    again.sum().backward()
    assert torch.equal(bridged.w.grad, again)  # the mask of the backward is that of the forward
    assert bridged.eval()(torch.ones(64)).all()


def test_its_key_follows_from_keras_seed():
    def run():
        keras.utils.set_random_seed(1)
        bridged = wrapped(noisy, "keras", {"w": jnp.ones(64)})
        return [np.asarray(bridged(tf.ones(64), training=True)) for _ in range(2)]

    (first, second), (again, _) = run(), run()
    assert (first == again).all() and (first != second).any()


class Pair(NamedTuple):
    """A container of Python's."""

    w: jax.Array
    b: jax.Array


@dataclasses.dataclass
class Registered:
    """A dataclass that JAX has been taught."""

    w: jax.Array
    b: jax.Array


jax.tree_util.register_dataclass(Registered, ["w", "b"], [])


@flax.struct.dataclass
class Struct:
    """A dataclass of Flax's, with a field that is no array."""

    w: jax.Array
    b: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="layer")


@pytest.mark.parametrize(
    ("params", "get", "names"),
    [
        ({"mlp/~/linear_0": {"w": W, "b": 0}}, lambda p: [p["mlp/~/linear_0"][k] for k in "wb"], ["mlp/~/linear_0.w"]),
        (Pair(W, jnp.zeros(2, "float32")), tuple, ["w", "b"]),
        (Registered(jnp.asarray(W), jnp.zeros(2, "float32")), lambda p: (p.w, p.b), ["w", "b"]),
        (Struct(jnp.asarray(W), jnp.zeros(2, "float32")), lambda p: (p.w, p.b), ["w", "b"]),
        ([jnp.asarray(W), (jnp.zeros(2, "float32"), None, "relu")], lambda p: (p[0], p[1][0]), ["0", "1.0"]),
        (flax.core.freeze({"w": W, "b": jnp.zeros(2, "float32")}), lambda p: (p["w"], p["b"]), ["b", "w"]),
    ],
    ids=["haiku", "named tuple", "dataclass", "flax.struct", "list", "frozen dict"],
)
def test_any_tree_of_jax_has_names_and_comes_back(params, get, names):
    def linear(params, x):
        w, b = get(params)
        return x @ w + b

    _, weights, _ = wrapped(linear, "jax", params)
    assert sorted(weights) == sorted(names)
    bridged = wrapped(linear, "torch", params)
    bridged(torch.from_numpy(X)).sum().backward()
    (grad,) = [p.grad for p in bridged.parameters() if p.ndim == 2]
    np.testing.assert_allclose(grad, np.broadcast_to(X.sum(0)[:, None], (3, 2)), rtol=1e-5)
    assert_same_trees(bridged.sync_to_source(), params, 0)


def test_numpy_arrays_are_trained_too():
    bridged = wrapped(lambda p, x: x @ p["w"], "torch", {"w": W})
    assert bridged.w.requires_grad


def test_a_key_and_integers_among_the_parameters_are_buffers():
    def rotated(params, x):
        noise = jax.random.normal(params["key"], (2,))
        return (x @ params["w"])[:, params["order"]] + noise

    params = {"w": jnp.asarray(W), "key": jax.random.key(3), "order": jnp.array([1, 0])}
    bridged = wrapped(rotated, "torch", params)
    assert [name for name, _ in bridged.named_parameters()] == ["w"]
    np.testing.assert_allclose(bridged(torch.from_numpy(X)).detach(), rotated(params, X), rtol=1e-5)
    assert bridged.sync_to_source()["key"] == params["key"]


def test_one_name_in_both_trees_is_two_names():
    def scaled(params, state, x):
        return x * params, state + 1

    bridged = wrapped(scaled, "torch", jnp.ones(3), jnp.zeros(()))
    bridged(torch.ones(3))
    assert dict(bridged.named_parameters()).keys() == {"params"}
    assert bridged.get_buffer("state.params") == 1


def test_a_state_with_other_parts_is_an_error():
    bridged = wrapped(lambda p, s, x: (x * p, {"b": s["a"]}), "torch", jnp.ones(3), {"a": jnp.zeros(())})
    with pytest.raises(polybridge.WeightsError, match="new state` lacks a and does not know b"):
        bridged(torch.ones(3))


class Linen(flax.linen.Module):
    """Of Flax's former kind."""

    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(flax.linen.tanh(flax.linen.Dense(4)(x)))


def test_flax_linen_goes_by_params():
    model = Linen()
    variables = model.init(jax.random.key(0), X)
    bridged = wrapped(model.apply, "torch", variables)
    bridged(torch.from_numpy(X)).sum().backward()
    expected = jax.grad(lambda v: model.apply(v, X).sum())(variables)
    for name, p in bridged.named_parameters():
        node = expected
        for part in name.split("."):
            node = node[part]
        np.testing.assert_allclose(p.grad, node, rtol=1e-5, atol=1e-6, err_msg=name)


# There and back.


def net():
    """A module of torch with statistics and dropout."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))


@pytest.mark.parametrize("dst", ["torch", "keras"])
def test_what_has_come_to_jax_goes_on(dst):
    module = net()
    there = polybridge.wrap(module, dst="jax")
    bridged = wrapped(there.apply, dst, there.params, there.state)
    ones, twin = np.ones((4, 3), "float32") * np.arange(4, dtype="float32")[:, None], net()
    if dst == "torch":
        out = bridged.eval()(torch.from_numpy(ones)).detach()
        bridged.train()
        torch.manual_seed(1)
        first = bridged(torch.from_numpy(ones))
        torch.manual_seed(1)
        assert torch.equal(bridged(torch.from_numpy(ones)), first)
        count = bridged.get_buffer("1.num_batches_tracked")
    else:
        out = bridged(tf.constant(ones), training=False)
        for _ in range(2):
            bridged(tf.constant(ones), training=True)
        count = bridged.state["1.num_batches_tracked"]
    np.testing.assert_allclose(out, twin.eval()(torch.from_numpy(ones)).detach(), rtol=1e-5, atol=1e-6)
    assert int(count) == 2
    assert module[1].num_batches_tracked == 0
    there.sync_to_source(*bridged.sync_to_source())
    assert module[1].num_batches_tracked == 2


def test_gradients_go_through_both_seams():
    module = net()[:2]
    there = polybridge.wrap(module, dst="jax")
    bridged = wrapped(there.apply, "torch", there.params, there.state)
    bridged(torch.from_numpy(X)).square().sum().backward()
    twin = net()[:2]
    twin(torch.from_numpy(X)).square().sum().backward()
    grads = {name: p.grad for name, p in bridged.named_parameters()}
    for name, p in twin.named_parameters():
        np.testing.assert_allclose(grads[name], p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_vmap_over_a_module_of_tensorflow_keeps_the_gradients_of_its_weights(per_example, jitted):
    class Squashed(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(np.linspace(-1, 1, 12).reshape(4, 3).astype("float32"))

        def __call__(self, x):
            return tf.tanh(x @ self.w)

    apply, params, state = polybridge.wrap(Squashed(), dst="jax")
    x = jnp.linspace(-2, 1, 20).reshape(5, 1, 4)

    def gradient(fn):
        one = jax.grad(lambda params, x: jnp.sum(fn(params, x) ** 2))
        if per_example:
            return jax.vmap(one, (None, 0))(params, x)["w"]
        return jax.grad(lambda params: jnp.sum(jax.vmap(lambda x: fn(params, x))(x) ** 2))(params)["w"]

    with pytest.warns(polybridge.LoopWarning):
        found = (jax.jit(gradient, static_argnums=0) if jitted else gradient)(lambda p, x: apply(p, state, x)[0])
        jax.block_until_ready(found)
    np.testing.assert_allclose(found, gradient(lambda p, x: jnp.tanh(x @ p["w"])), 1e-5, 1e-6)
