"""Asks that a Keras layer or model, of whatever kind, is computed as Keras computes it, and trained as it trains it."""

import copy
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.modules import keras_models


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def batch(rng, *shape):
    return rng.standard_normal(shape or (5, 4)).astype("float32")


def calls(module, x, seed, count=1):
    torch.manual_seed(seed)
    return [module(x).detach() for _ in range(count)]


# Weights that the first call makes.


def test_late_weights_are_refused_before_the_first_call_and_there_after_it(rng):
    model = keras_models.Late()
    module = polybridge.wrap(model, dst="torch")
    net = torch.nn.Sequential(module, torch.nn.Linear(2, 1))
    with pytest.raises(polybridge.UnbuiltError, match=r"Late.*Call it once"):
        torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(polybridge.UnbuiltError):
        net.state_dict()
    x = batch(rng)
    found = module(torch.from_numpy(x))
    np.testing.assert_allclose(found.detach(), model(x, training=True), rtol=1e-5, atol=1e-6)
    assert [name for name, _ in module.named_parameters()] == [
        "dense.kernel", "dense.bias", "batch_normalization.gamma", "batch_normalization.beta",
        "dense_1.kernel", "dense_1.bias",
    ]  # fmt: skip
    found.sum().backward()
    assert all(p.grad is not None for p in net[0].parameters())


def test_a_copy_from_before_the_first_call_makes_weights_of_its_own(rng):
    module = polybridge.wrap(keras_models.Late(), dst="torch")
    twin, x = copy.deepcopy(module), torch.from_numpy(batch(rng))
    assert torch.equal(module(x), twin(x))
    assert twin.dense.kernel is not module.dense.kernel and len(list(twin.parameters())) == 6


def test_building_leaves_the_state_as_it_is_made(rng):
    module, x = polybridge.wrap(keras_models.Late(), dst="torch"), torch.from_numpy(batch(rng))
    module(x)
    module.eval()
    once = module.batch_normalization.moving_mean.clone()
    hidden = np.tanh(x @ module.dense.kernel.detach() + module.dense.bias.detach())
    np.testing.assert_allclose(once, 0.01 * hidden.mean(0), rtol=1e-3, atol=1e-6)


def test_a_sequential_without_an_input_is_built_by_the_first_call(rng):
    module = polybridge.wrap(keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)]), dst="torch")
    assert module(torch.from_numpy(batch(rng))).shape == (5, 2)
    assert len(list(module.parameters())) == 4


def test_a_layer_whose_inner_layers_are_late_is_not_evaluated_with_passing_weights(rng):
    class Net(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(3)

        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x):
            return self.scale * self.inner(x)

    net = Net()
    net.build((None, 4))
    module, x = polybridge.wrap(net, dst="torch"), torch.from_numpy(batch(rng))
    with pytest.warns(polybridge.DetachedStateWarning, match=r"first call: .*kernel.*after the first call"):
        found = module(x)
    assert torch.equal(found, module(x)) and len(list(module.parameters())) == 3
    np.testing.assert_allclose(found.detach(), net(x.numpy()), rtol=1e-6)


def test_other_destinations_ask_for_a_call_before():
    with pytest.raises(polybridge.UnbuiltError, match="jax takes them when it is made"):
        polybridge.wrap(keras_models.Late(), dst="jax")


# State, modes and randomness.


def test_statistics_change_once_a_training_step_and_never_in_evaluation(rng):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization(momentum=0.9)])
    module, mean = polybridge.wrap(model, dst="torch"), np.zeros(4, "float32")
    for _ in range(4):
        x = batch(rng)
        module(torch.from_numpy(x)).sum().backward()
        mean = 0.9 * mean + 0.1 * x.mean(0)
        np.testing.assert_allclose(module.batch_normalization.moving_mean, mean, rtol=1e-5, atol=1e-7)
    before = module.batch_normalization.moving_mean.clone()
    module.eval()(torch.from_numpy(batch(rng)))
    assert torch.equal(module.batch_normalization.moving_mean, before)


def test_a_backward_uses_the_statistics_of_its_forward(rng):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization(momentum=0.0)])
    module = polybridge.wrap(model, dst="torch").eval()
    x = torch.from_numpy(batch(rng)).requires_grad_()
    loss = module(x).sum()
    module.train()(torch.from_numpy(100 * batch(rng)))
    loss.backward()
    np.testing.assert_allclose(x.grad, np.full((5, 4), 1 / np.sqrt(1 + 1e-3)), rtol=1e-5)


def test_dropout_follows_torch_s_seed(rng):
    module, x = polybridge.wrap(keras_models.dropping(), dst="torch"), torch.ones(8, 64)
    first = calls(module, x, 1, 3)
    again = calls(module, x, 1, 3)
    other = calls(module, x, 2, 1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])
    assert set(first[0].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(module.eval()(x), x)


def test_a_backward_uses_the_mask_of_its_forward():
    module = polybridge.wrap(keras_models.dropping(), dst="torch")
    for _ in range(3):
        x = torch.ones(8, 64, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())


def test_layers_draw_masks_of_their_own():
    module = polybridge.wrap(keras_models.dropping(2), dst="torch")
    kept = float((module(torch.ones(64, 64)) != 0).float().mean())
    assert 0.2 < kept < 0.3  # of independent masks a quarter, of equal ones a half


def test_a_layer_that_draws_without_a_generator_of_its_own_follows_the_seed_too():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return keras.random.dropout(x, 0.5)

    module, x = polybridge.wrap(Noise(), dst="torch"), torch.ones(8, 64)
    module(x)
    first, again = calls(module, x, 1, 3), calls(module, x, 1, 3)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], first[1])


def test_a_seed_generator_s_state_is_in_the_state_dict_and_moves_while_training():
    module = polybridge.wrap(keras_models.dropping(), dst="torch")
    (name,) = module.state_dict()
    before = module.state_dict()[name].clone()
    module(torch.ones(2, 64))
    assert "seed_generator" in name and not torch.equal(module.state_dict()[name], before)
    before = module.state_dict()[name].clone()
    module.eval()(torch.ones(2, 64))
    assert torch.equal(module.state_dict()[name], before)


def test_a_stateful_recurrent_layer_carries_its_state(rng):
    model = keras.Sequential([keras.layers.Input(batch_shape=(2, 3, 4)), keras.layers.GRU(5, stateful=True)])
    module, x = polybridge.wrap(model, dst="torch").eval(), batch(rng, 2, 3, 4)
    found = [module(torch.from_numpy(x)).detach() for _ in range(3)]
    expected = [model(x) for _ in range(3)]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_spectral_normalisation_trains_as_in_keras(rng):
    def make():
        inner = keras.layers.Dense(3, name="inner")
        return keras.Sequential([keras.layers.Input((4,)), keras.layers.SpectralNormalization(inner)])

    bridged, native = make(), make()
    native.set_weights(bridged.get_weights())
    module = polybridge.wrap(bridged, dst="torch")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(5):
        x = batch(rng)
        optimizer.zero_grad()
        module(torch.from_numpy(x)).square().mean().backward()
        optimizer.step()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(native(x, training=True) ** 2)
        for v, g in zip(native.trainable_variables, tape.gradient(loss, native.trainable_variables), strict=True):
            v.assign_sub(0.1 * g)
    for mine, theirs in zip(module.sync_to_source().get_weights(), native.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_destination_that_cannot_store_an_assigned_weight_says_so(rng):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.SpectralNormalization(keras.layers.Dense(3))])
    bridged = polybridge.wrap(model, dst="jax")
    with pytest.raises(polybridge.MutationError, match="kernel"):
        bridged.apply(bridged.params, bridged.state, np.ones((1, 4), "float32"), training=True)


def test_losses_that_a_destination_has_no_place_for_are_announced():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, kernel_regularizer="l2")])
    bridged = polybridge.wrap(model, dst="jax")
    with pytest.warns(polybridge.DetachedStateWarning, match="adds 1 terms to the loss"):
        bridged.apply(bridged.params, bridged.state, np.ones((1, 4), "float32"))


def test_a_metric_inside_of_a_layer_counts_here(rng):
    class Watched(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean_input")

        def call(self, x):
            self.mean.update_state(x)
            return 2 * x

    layer = Watched()
    layer(batch(rng))
    layer.mean.reset_state()
    module = polybridge.wrap(layer, dst="torch")
    for _ in range(3):
        module(torch.ones(2, 4))
    state = {name.rpartition(".")[2]: float(x) for name, x in module.named_buffers()}
    assert float(layer.mean.count.numpy()) == 0
    for _ in range(3):
        layer(np.ones((2, 4)))
    assert state == {"total": float(layer.mean.total.numpy()), "count": float(layer.mean.count.numpy())}
    assert state["count"] > 0


# Losses that layers add.


def test_regularisers_and_added_losses_are_tensors_after_a_call(rng):
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.5 * keras.ops.sum(x**2))
            return x

    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(2, activity_regularizer=keras.regularizers.L1(0.2)),
            Penalty(),
        ]
    )
    module, x = polybridge.wrap(model, dst="torch"), batch(rng)
    for _ in range(3):  # eagerly, then as a graph
        module.zero_grad()
        module(torch.from_numpy(x))
        assert len(module.losses) == 3
        sum(module.losses).backward()
        with tf.GradientTape() as tape:
            model(x)
            expected = sum(model.losses)
        np.testing.assert_allclose(float(sum(module.losses)), float(expected), rtol=1e-5)
        for p, g in zip(module.parameters(), tape.gradient(expected, model.trainable_variables), strict=True):
            np.testing.assert_allclose(p.grad, g, rtol=1e-4, atol=1e-6)


# Signatures.


def test_masks_nested_inputs_and_several_results(rng):
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    y = keras.layers.Dense(2, name="left")(a)
    z = keras.layers.Dense(2, name="right")(keras.layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"sum": y + z, "parts": [y, z]})
    module = polybridge.wrap(model, dst="torch")
    x = {"a": batch(rng), "b": batch(rng, 5, 3)}
    for _ in range(3):
        found = module({name: torch.from_numpy(v) for name, v in x.items()})
        expected = model(x)
        np.testing.assert_allclose(found["sum"].detach(), expected["sum"], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(found["parts"], expected["parts"], strict=True):
            np.testing.assert_allclose(mine.detach(), theirs, rtol=1e-5, atol=1e-6)


def test_a_mask_reaches_the_layer(rng):
    layer = keras.layers.LSTM(3)
    x, mask = batch(rng, 2, 5, 4), np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    expected = layer(x, mask=mask)
    module = polybridge.wrap(layer, dst="torch")
    for _ in range(3):
        found = module(torch.from_numpy(x), mask=torch.from_numpy(mask))
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-5, atol=1e-6)


def test_attention_takes_several_tensors(rng):
    layer = keras.layers.MultiHeadAttention(2, 4)
    q, v = batch(rng, 2, 3, 8), batch(rng, 2, 5, 8)
    expected, scores = layer(q, v, return_attention_scores=True)
    module = polybridge.wrap(layer, dst="torch")
    for _ in range(3):
        found = module(torch.from_numpy(q), torch.from_numpy(v), return_attention_scores=True)
        np.testing.assert_allclose(found[0].detach(), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[1].detach(), scores, rtol=1e-4, atol=1e-6)


def test_an_embedding_gets_a_dense_gradient():
    layer = keras.layers.Embedding(10, 3)
    layer.build()
    module = polybridge.wrap(layer, dst="torch")
    for _ in range(3):
        module.zero_grad()
        module(torch.tensor([[1, 1, 4]])).sum().backward()
        expected = torch.zeros(10, 3)
        expected[1], expected[4] = 2, 1
        assert torch.equal(module.embeddings.grad, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_keras_s_own_message_says_what_is_wrong_with_an_input(rng, count):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    for _ in range(count):
        module(torch.from_numpy(batch(rng)))
    with pytest.raises(ValueError, match=r"(?s)incompatible with the layer.*axis -1"):
        module(torch.from_numpy(batch(rng, 5, 7)))


# As a graph.


def test_a_graph_gives_the_bits_that_the_first_call_gave(rng):
    module, x = polybridge.wrap(keras_models.mlp(), dst="torch"), torch.from_numpy(batch(rng))
    first, later = module(x), [module(x) for _ in range(3)]
    assert all(torch.equal(first, y) for y in later)


def test_python_runs_at_the_first_two_calls_of_a_kind_only(rng):
    class Counting(keras.layers.Layer):
        runs = 0

        def call(self, x):
            self.runs += 1
            return x * 2

    layer = Counting()
    module = polybridge.wrap(layer, dst="torch")
    for _ in range(5):
        module(torch.from_numpy(batch(rng)))
    built = layer.runs
    module(torch.from_numpy(batch(rng)))
    assert layer.runs == built


def test_a_model_that_runs_eagerly_is_never_a_graph(rng):
    class Counting(keras.Model):
        runs = 0

        def call(self, x):
            self.runs += 1
            return x * 2

    model = Counting()
    model.compile(run_eagerly=True)
    module = polybridge.wrap(model, dst="torch")
    module(torch.from_numpy(batch(rng)))
    before = model.runs
    for _ in range(4):
        module(torch.from_numpy(batch(rng)))
    assert model.runs == before + 4


def test_what_cannot_be_traced_runs_eagerly_after_a_warning(rng):
    class Branching(keras.layers.Layer):
        def call(self, x):
            return x * 2 if float(tf.reduce_sum(x)) > 0 else x

    module = polybridge.wrap(Branching(), dst="torch")
    module(torch.ones(3))
    with pytest.warns(polybridge.UntracedWarning, match="could not trace it"):
        module(torch.ones(3))
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(module(-torch.ones(3)), -torch.ones(3))


def test_freezing_the_source_s_normalisation_reaches_its_graph(rng):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization()])
    module, x = polybridge.wrap(model, dst="torch"), batch(rng)
    for _ in range(3):
        module(torch.from_numpy(x))
    model.layers[0].trainable = False
    module.sync_to_source()
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), model(x, training=True), rtol=1e-5, atol=1e-6)


def test_threads_compute_with_their_own_weights(rng):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    modules = [copy.deepcopy(module) for _ in range(3)]
    for number, each in enumerate(modules):
        each.load_state_dict({name: (1 + number) * x for name, x in module.state_dict().items()})
    x, found = torch.from_numpy(batch(rng)), {}

    def compute(number):
        found[number] = [modules[number](x).detach() for _ in range(20)]

    threads = [threading.Thread(target=compute, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, each in enumerate(modules):
        assert all(torch.equal(y, each(x)) for y in found[number])
    assert not torch.equal(found[0][0], found[1][0])


def test_weights_made_in_inference_mode_are_trained_later(rng):
    module = polybridge.wrap(keras_models.Late(), dst="torch")
    with torch.inference_mode():
        module(torch.from_numpy(batch(rng)))
    module(torch.from_numpy(batch(rng))).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_two_instances_with_a_bridged_layer_have_the_same_names():
    models = [keras.Sequential([keras.Input((4,)), polybridge.wrap(torch.nn.Linear(4, 2), dst="keras")]) for _ in "ab"]
    names = [list(polybridge.wrap(model, dst="torch").state_dict()) for model in models]
    assert names[0] == names[1]


@pytest.mark.parametrize("called", [0, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.add(keras.layers.Dense(3)),
        lambda model: model.pop(),
        lambda model: model.layers[0].enable_lora(2),
    ],
    ids=["add", "remove", "lora"],
)
def test_a_source_that_was_rebuilt_has_to_be_wrapped_again(rng, change, called):
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    x = torch.from_numpy(batch(rng))
    model(x.numpy())
    module = polybridge.wrap(model, dst="torch")
    for _ in range(called):
        module(x)
    change(model)
    for use in (lambda: module(x), module.sync_to_source):
        with pytest.raises(polybridge.WeightsError, match="Wrap it again"):
            use()
    expected = model(x.numpy())
    again = polybridge.wrap(model, dst="torch")
    np.testing.assert_allclose(again(x).detach().numpy(), expected, rtol=1e-5)
    model.compile("adam", "mse")  # changes nothing about it
    model.fit(x.numpy(), np.zeros(expected.shape), verbose=0)
    again.sync_from_source()
    np.testing.assert_allclose(again(x).detach().numpy(), model(x.numpy()), rtol=1e-5)


class Recomputing(keras.layers.Layer):
    def __init__(self, recompute):
        super().__init__()
        self.first, self.last = keras.layers.Dense(8, "tanh"), keras.layers.Dense(4, "tanh")
        self.recompute = recompute

    def build(self, shape):
        self.first.build(shape), self.last.build((None, 8))

    def call(self, x):
        return self.recompute(lambda x: self.last(self.first(x)))(x)


class RecomputingModule(tf.Module):
    def __init__(self, recompute):
        super().__init__()
        self.w = tf.Variable(tf.ones((4, 4)))
        self.recompute = recompute

    def __call__(self, x):
        return self.recompute(lambda x: tf.tanh(tf.tanh(x @ self.w)))(x)


@pytest.mark.parametrize("recompute", [keras.remat, tf.recompute_grad])
@pytest.mark.parametrize("kind", [Recomputing, RecomputingModule])
def test_a_source_that_recomputes_is_differentiated_at_the_weights_of_the_call(rng, kind, recompute):
    sources = [kind(recompute), kind(lambda f: f)]
    for source in sources:
        source.build((None, 4)) if kind is Recomputing else None
    modules = [polybridge.wrap(source, dst="torch") for source in sources]
    with torch.no_grad():
        for p, q in zip(*(module.parameters() for module in modules), strict=True):
            p.normal_(), q.copy_(p)
    values = batch(rng)
    for _ in range(3):  # eagerly, and as a graph
        grads = []
        for module in modules:
            x = torch.from_numpy(values).requires_grad_()
            grads.append(torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]))
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
