"""Asks that a module of another framework is `(apply, params, state)` in JAX, and trains as its native twin does."""

import copy
import io
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from torch._subclasses.fake_tensor import FakeTensor

import polybridge
from polybridge.backends.jax import convert
from polybridge.observe import count_crossings

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4))
Y = RNG.normal(size=(8, 2))


def mlp(dtype=torch.float32):
    """A small module of torch, always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(dtype)


def normed():
    """One with statistics."""
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 6, bias=False)  # a bias before a normalisation has no gradient but noise
    return torch.nn.Sequential(inner, torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def array(x, dtype="float32"):
    """An array of JAX."""
    return jnp.asarray(x, dtype)


def loss_of(apply, **options):
    """A loss with the state beside it."""

    def loss(params, state, x, y):
        out, state = apply(params, state, x, **options)
        return ((out - y) ** 2).mean(), state

    return loss


def native_loss(module, x, y):
    """The same in torch."""
    dtype = next(module.parameters()).dtype
    return ((module(torch.tensor(np.array(x), dtype=dtype)) - torch.tensor(np.array(y), dtype=dtype)) ** 2).mean()


def native_gradients(module, x=X, y=Y):
    """torch's own gradients by name."""
    return dict(
        zip(
            [name for name, _ in module.named_parameters()],
            torch.autograd.grad(native_loss(module, x, y), list(module.parameters())),
            strict=True,
        )
    )


def assert_close(found, expected, tolerance=1e-6):
    """Compare dicts of arrays of whatever framework."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        x = x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        np.testing.assert_allclose(np.asarray(found[name]), x, rtol=tolerance, atol=tolerance, err_msg=name)


def state_of(module):
    """The parameters and buffers of a module of torch."""
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


# Gradients.


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_gradients_are_those_of_torch(compiled):
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    gradient = jax.value_and_grad(loss_of(apply), has_aux=True)
    (value, _), grads = (jax.jit(gradient) if compiled else gradient)(params, state, array(X), array(Y))
    assert_close(grads, native_gradients(mlp()))
    np.testing.assert_allclose(value, native_loss(mlp(), X, Y).item(), rtol=1e-6)


def test_gradients_are_those_of_torch_in_64_bits():
    with jax.enable_x64(True):
        apply, params, state = polybridge.wrap(mlp(torch.float64), dst="jax")
        grads, _ = jax.jit(jax.grad(loss_of(apply), has_aux=True))(
            params, state, array(X, "float64"), array(Y, "float64")
        )
    assert {x.dtype.name for x in grads.values()} == {"float64"}
    assert_close(grads, native_gradients(mlp(torch.float64)), 1e-12)


def test_per_example_gradients_are_those_of_torch():
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    grads, _ = jax.vmap(jax.grad(loss_of(apply), has_aux=True), in_axes=(None, None, 0, 0))(
        params, state, array(X), array(Y)
    )
    for i in range(3):
        assert_close({k: g[i] for k, g in grads.items()}, native_gradients(mlp(), X[i], Y[i]))


def test_an_ensemble_is_a_vmap_over_params():
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    grads, _ = jax.jit(jax.vmap(jax.grad(loss_of(apply), has_aux=True), in_axes=(0, None, None, None)))(
        stacked, state, array(X), array(Y)
    )
    twin = mlp()
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector(twin.parameters()), twin.parameters())
    assert_close({k: g[1] for k, g in grads.items()}, native_gradients(twin))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_hessian_vector_product_is_that_of_torch(compiled):
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    vector = jax.tree.map(jnp.ones_like, params)

    def product(params):
        gradient = jax.grad(lambda p: loss_of(apply)(p, state, array(X), array(Y))[0])
        return jax.jvp(gradient, (params,), (vector,))[1]

    found = (jax.jit(product) if compiled else product)(params)
    twin = mlp()
    grads = torch.autograd.grad(native_loss(twin, X, Y), list(twin.parameters()), create_graph=True)
    expected = torch.autograd.grad(sum(g.sum() for g in grads), list(twin.parameters()))
    assert_close(found, dict(zip(dict(twin.named_parameters()), expected, strict=True)), 1e-5)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["all", "dots"])
def test_checkpoint_gives_the_same_gradients(policy):
    apply, params, state = polybridge.wrap(normed(), dst="jax")
    block = jax.checkpoint(lambda p, s, x: apply(p, s, x, training=True), policy=policy)

    def loss(params, state):
        out, state = block(params, state, array(X))
        return ((out - array(Y)) ** 2).mean(), state

    grads, after = jax.jit(jax.grad(loss, has_aux=True))(params, state)
    assert_close(grads, native_gradients(normed()))
    assert after["1.num_batches_tracked"] == 1


class Kept:
    """Counts what torch keeps for backwards."""

    alive = most = 0

    def __init__(self):
        Kept.alive += 1
        Kept.most = max(Kept.most, Kept.alive)

    def __del__(self):
        Kept.alive -= 1


class Keeping(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(ctx, x):
        if not isinstance(x, FakeTensor):
            ctx.kept = Kept()
        return 2 * x

    @staticmethod
    def backward(ctx, ct):
        return 2 * ct


class Block(torch.nn.Module):
    """Of a deep network."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Keeping.apply(x * self.scale)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "scan under jit"])
def test_checkpoint_keeps_fewer_activations(compiled):
    """Under jit, XLA on CPUs runs the second forward of a chain without a loop beside the first."""
    apply, params, state = polybridge.wrap(Block(), dst="jax")
    layers = jax.tree.map(lambda p: jnp.stack([p] * 6), params)
    x = jnp.ones(2**21)  # 8 MiB

    def most(wrapped):
        block = wrapped(lambda x, params: apply(params, state, x)[0])

        def loss(layers):
            if compiled:
                return jax.lax.scan(lambda x, p: (block(x, p), None), x, layers)[0].mean()
            out = x
            for i in range(6):
                out = block(out, {name: p[i] for name, p in layers.items()})
            return out.mean()

        gradient = jax.jit(jax.grad(loss)) if compiled else jax.grad(loss)
        gradient(layers)["scale"].block_until_ready()
        Kept.most = Kept.alive
        np.testing.assert_allclose(gradient(layers)["scale"], [64] * 6)
        return Kept.most

    assert most(lambda block: block) >= 6
    assert most(jax.checkpoint) <= 3


def test_a_branch_of_cond_has_its_gradients():
    apply, params, state = polybridge.wrap(mlp(), dst="jax")

    @jax.jit
    def gradient(params, flag):
        def loss(params):
            out = jax.lax.cond(flag, lambda p: apply(p, state, array(X))[0], lambda p: jnp.zeros((8, 2)), params)
            return ((out - array(Y)) ** 2).mean()

        return jax.grad(loss)(params)

    assert_close(gradient(params, True), native_gradients(mlp()))
    assert all(not g.any() for g in gradient(params, False).values())


def test_what_is_tied_is_one_leaf_with_the_sum_of_gradients():
    class Autoencoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.down, self.up = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x):
            return self.up(torch.tanh(self.down(x)))

    apply, params, state = polybridge.wrap(Autoencoder(), dst="jax")
    grads, _ = jax.grad(loss_of(apply), has_aux=True)(params, state, array(X), array(X))
    assert list(params) == ["down.weight"]
    assert_close(grads, native_gradients(Autoencoder(), X, X))


# Training.


def trained(optimizer, module, steps=10, masked=None):
    """Parameters and state after some compiled steps, and the bridge."""
    bridged = polybridge.wrap(module, dst="jax")
    apply, params, state = bridged
    chosen = optimizer if masked is None else masked(optimizer, params)

    @jax.jit
    def step(params, state, moments):
        grads, state = jax.grad(loss_of(apply, training=True), has_aux=True)(params, state, array(X), array(Y))
        updates, moments = chosen.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments

    moments = chosen.init(params)
    for _ in range(steps):
        params, state, moments = step(params, state, moments)
    return bridged, params, state


def natively_trained(module, groups, optimizer, steps=10):
    """The same in torch."""
    chosen = optimizer(groups(module))
    for _ in range(steps):
        chosen.zero_grad()
        native_loss(module, X, Y).backward()
        chosen.step()
    return module


def everything(module):
    """All parameters."""
    return module.parameters()


def test_adam_trains_it_as_torch_trains_its_twin():
    _, params, state = trained(optax.adam(1e-2), normed())
    twin = natively_trained(normed(), everything, lambda p: torch.optim.Adam(p, 1e-2))
    assert_close({**params, **state}, state_of(twin), 1e-5)


def test_a_mask_by_name_leaves_the_other_weights_bit_equal():
    def head_only(optimizer, params):
        names = {name: "head" if name.startswith("2.") else "rest" for name in params}
        return optax.multi_transform({"head": optimizer, "rest": optax.set_to_zero()}, names)

    _, params, _ = trained(optax.adam(1e-2), mlp(), masked=head_only)
    twin = natively_trained(mlp(), lambda m: m[2].parameters(), lambda p: torch.optim.Adam(p, 1e-2))
    assert_close(params, state_of(twin), 1e-5)
    np.testing.assert_array_equal(params["0.weight"], mlp()[0].weight.detach())


def test_frozen_weights_are_state_that_weight_decay_does_not_see():
    module = mlp()
    module[0].requires_grad_(False)
    before = state_of(module)
    bridged, params, state = trained(optax.adamw(1e-2, weight_decay=0.1), module)
    assert set(params) == {"2.weight", "2.bias"}
    twin = mlp()
    twin[0].requires_grad_(False)
    natively_trained(twin, lambda m: m[2].parameters(), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1))
    assert_close(params, {k: x for k, x in state_of(twin).items() if k.startswith("2.")}, 1e-5)
    bridged.sync_to_source(params, state)
    assert torch.equal(module[0].weight, before["0.weight"])


def test_a_frozen_weight_that_moves_into_params_is_trained():
    module = mlp()
    module[0].requires_grad_(False)
    apply, params, state = polybridge.wrap(module, dst="jax")
    grads, _ = jax.grad(loss_of(apply), has_aux=True)(params | state, {}, array(X), array(Y))
    assert_close(grads, native_gradients(mlp()))
    grads, _ = jax.grad(loss_of(apply), has_aux=True)({}, params | state, array(X), array(Y))
    assert grads == {}


def test_a_frozen_backbone_costs_no_gradients_of_its_weights():
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, ct):
            calls.append(1)
            return ct

    class Frozen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
            self.inner.requires_grad_(False)

        def forward(self, x):
            return Counted.apply(self.inner.weight @ x) * self.scale

    calls = []
    apply, params, state = polybridge.wrap(Frozen(), dst="jax")
    jax.grad(lambda p, x: apply(p, state, x)[0].sum())(params, array(X[0]))
    assert len(calls) == 1  # for x, which JAX differentiates in whatever is asked of the result
    calls.clear()
    jax.grad(lambda p: apply(p, state, jnp.ones(4, "float32"))[0].sum())(params)
    assert len(calls) <= 1


def test_scan_counts_every_step_once():
    apply, params, state = polybridge.wrap(normed(), dst="jax")
    batches = RNG.normal(size=(5, 8, 4))

    def step(carry, x):
        params, state = carry
        grads, state = jax.grad(loss_of(apply, training=True), has_aux=True)(params, state, x, array(Y))
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state), None

    (params, state), _ = jax.lax.scan(step, (params, state), array(batches))
    twin = normed()
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        native_loss(twin, x, Y).backward()
        optimizer.step()
    assert_close({**params, **state}, state_of(twin), 1e-5)


def test_donated_parameters_train_the_same():
    apply, params, state = polybridge.wrap(normed(), dst="jax")
    expected = jax.tree.map(np.array, params)

    def step(params, state):
        grads, state = jax.grad(loss_of(apply, training=True), has_aux=True)(params, state, array(X), array(Y))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(5):
        params, state = donating(params, state)
    twin = natively_trained(normed(), everything, lambda p: torch.optim.SGD(p, 0.1), 5)
    assert_close({**params, **state}, state_of(twin), 1e-5)
    assert_close(state_of_params(normed()), expected, 0)  # and nothing else has been written to


def state_of_params(module):
    """The parameters alone."""
    return {name: x.detach() for name, x in module.named_parameters()}


def test_a_donation_after_an_eager_forward_leaves_the_backward_right():
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    for _ in range(3):  # until memory is shared
        jax.grad(loss_of(apply), has_aux=True)(params, state, array(X), array(Y))
    _, pull, _ = jax.vjp(lambda p: loss_of(apply)(p, state, array(X), array(Y)), params, has_aux=True)
    jax.jit(lambda p: jax.tree.map(lambda x: 0 * x - 7, p), donate_argnums=0)(params)
    (grads,) = pull(array(1.0))
    assert_close(grads, native_gradients(mlp()))


# State, and the one source of truth.


def test_tracing_changes_neither_the_source_nor_counts_twice():
    module = normed()
    before = state_of(module)
    apply, params, state = polybridge.wrap(module, dst="jax")
    step = jax.jit(lambda p, s, x: apply(p, s, x, training=True))
    for rows in (8, 4, 8, 6):  # each traces again
        _, state = step(params, state, array(X[:rows]))
    assert state["1.num_batches_tracked"] == 4
    assert_close(state_of(module), before, 0)


def test_evaluation_uses_the_statistics_and_changes_nothing():
    apply, params, state = polybridge.wrap(normed(), dst="jax")
    _, state = apply(params, state, array(X), training=True)
    out, after = jax.jit(apply)(params, state, array(X))
    twin = normed()
    twin(torch.tensor(X, dtype=torch.float32))
    np.testing.assert_allclose(out, twin.eval()(torch.tensor(X, dtype=torch.float32)).detach(), rtol=1e-5, atol=1e-6)
    assert_close(after, state, 0)


def test_the_weights_go_back_bit_for_bit():
    module = normed()
    bridged, params, state = trained(optax.adam(1e-2), module, 3)
    assert bridged.sync_to_source(params, state) is module
    for name, x in module.state_dict().items():
        np.testing.assert_array_equal(x, np.asarray({**params, **state}[name]))
    params, state = bridged.sync_from_source()
    assert_close({**params, **state}, state_of(module), 0)


def test_without_state_the_source_keeps_its_own():
    module = normed()
    bridged, params, _ = trained(optax.sgd(1e-2), module, 3)
    before = state_of(module)
    bridged.sync_to_source(params)
    assert torch.equal(module[1].running_mean, before["1.running_mean"])
    assert not torch.equal(module[0].weight, before["0.weight"])


def test_integers_reach_the_module_as_they_were():
    class Looking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(6.0))
            self.register_buffer("places", torch.tensor([3, 1, 2]))
            self.register_buffer("mask", torch.tensor([True, False, True]))

        def forward(self):
            assert self.places.dtype is torch.int64
            return torch.gather(self.weight, 0, self.places) * self.mask

    apply, params, state = polybridge.wrap(Looking(), dst="jax")
    grads = jax.jit(jax.grad(lambda p: apply(p, state)[0].sum()))(params)
    np.testing.assert_array_equal(grads["weight"], [0, 0, 1, 1, 0, 0])


def test_64_bits_are_cut_with_one_warning_and_the_source_keeps_its_dtype():
    convert._tell_of_precision.cache_clear()
    module = mlp(torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bridged, params, state = trained(optax.sgd(0.1), module, 2)
        bridged.sync_to_source(params, state)
    assert [w.category for w in told] == [polybridge.PrecisionWarning]
    assert module[0].weight.dtype is torch.float64
    np.testing.assert_array_equal(module[0].weight.detach().numpy(), np.asarray(params["0.weight"], "float64"))


def test_parameters_are_a_tree_that_numpy_stores():
    apply, params, state = polybridge.wrap(normed(), dst="jax")
    file = io.BytesIO()
    np.savez(file, **params, **state)
    file.seek(0)
    loaded = dict(np.load(file))
    weights = {name: loaded[name] for name in params}
    rest = {name: loaded[name] for name in state}
    np.testing.assert_array_equal(apply(weights, rest, array(X))[0], apply(params, state, array(X))[0])
    assert jax.tree.structure(params) == jax.tree.structure(jax.tree.map(lambda x: 2 * x, params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {k: x for k, x in p.items() if k != "2.bias"}, r"`Sequential` lacks 2\.bias"),
        (lambda p: p | {"3.bias": p["2.bias"]}, r"`Sequential` does not know 3\.bias"),
        (lambda p: p | {"2.bias": jnp.zeros((3, 2))}, r"2\.bias has shape \(3, 2\).*own has \(2,\)"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_weights_that_do_not_fit_are_named(change, message):
    bridged = polybridge.wrap(mlp(), dst="jax")
    with pytest.raises(polybridge.WeightsError, match=message):
        bridged.apply(change(bridged.params), bridged.state, array(X))
    with pytest.raises(polybridge.WeightsError, match=message):
        jax.jit(bridged.apply)(change(bridged.params), bridged.state, array(X))
    if "lacks" not in message:
        with pytest.raises(polybridge.WeightsError, match=message):
            bridged.sync_to_source(change(bridged.params))


def test_after_the_first_calls_no_weight_is_copied():
    apply, params, state = polybridge.wrap(mlp(), dst="jax")
    x, y = array(X), array(Y)
    for _ in range(3):
        jax.grad(loss_of(apply), has_aux=True)(params, state, x, y)
        apply(params, state, x)
    with count_crossings() as counted:
        out, _ = apply(params, state, x)
    weights = sum(p.nbytes for p in params.values())
    assert counted.crossings == len(params) + 2  # with x and the result
    assert counted.bytes_copied <= out.nbytes < weights


# Other sources.


def test_a_layer_of_keras_trains_as_its_twin():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.build((None, 4))
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    bridged, params, state = trained(optax.sgd(0.1), model, 4)
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((twin(tf.constant(X, "float32"), training=True) - tf.constant(Y, "float32")) ** 2)
        for v, g in zip(twin.trainable_variables, tape.gradient(loss, twin.trainable_variables), strict=True):
            v.assign_sub(0.1 * g)
    bridged.sync_to_source(params, state)
    for found, expected in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_tf_module_has_its_gradients():
    class Scale(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([1.0, 2.0, 3.0, 4.0])
            self.calls = tf.Variable(0, trainable=False)

        def __call__(self, x):
            self.calls.assign_add(1)
            return x * self.w

    apply, params, state = polybridge.wrap(Scale(), dst="jax")
    grads, state = jax.jit(
        jax.grad(lambda p, s: (lambda out, s: (out.sum(), s))(*apply(p, s, array(X))), has_aux=True)
    )(params, state)
    np.testing.assert_allclose(grads["w"], X.sum(0), rtol=1e-5)
    assert state["calls"] == 1


@pytest.mark.parametrize(
    "lazy", [lambda: torch.nn.LazyLinear(3), lambda: keras.Sequential([keras.layers.Dense(3)])], ids=["torch", "keras"]
)
@pytest.mark.parametrize("dst", ["jax", "flax", "equinox"])
def test_a_module_without_weights_has_to_be_called_first(lazy, dst):
    with pytest.raises(polybridge.UnbuiltError, match="makes its weights at its first call"):
        polybridge.wrap(lazy(), dst=dst)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_dropout_of_keras_follows_from_the_key_or_else_from_its_state(compiled):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
    apply, params, state = polybridge.wrap(model, dst="jax")

    def run(state, key):
        return apply(params, state, jnp.ones((1, 64)), rng=key, training=True)

    run = jax.jit(run) if compiled else run
    (one, _), (same, _), (other, _) = (run(state, jax.random.key(seed)) for seed in (0, 0, 1))
    assert (one == same).all() and (one != other).any()
    (one, after), (same, _) = run(state, None), run(state, None)
    (other, _) = run(after, None)
    assert (one == same).all() and (one != other).any()


def test_a_copy_of_the_module_is_another_module():
    module = mlp()
    first, second = polybridge.wrap(module, dst="jax"), polybridge.wrap(copy.deepcopy(module), dst="jax")
    assert first.apply is not second.apply
    assert_close(first.params, second.params, 0)
