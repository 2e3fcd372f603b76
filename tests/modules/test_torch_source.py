"""Asks of torch modules of every kind that they compute and differentiate with weights that TensorFlow holds."""

import concurrent.futures
import copy

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn
from torch.nn.utils import parametrizations

import polybridge
from polybridge.observe import count_crossings

RANDOM = np.random.default_rng(0)


def floats(*shape):
    return RANDOM.standard_normal(shape).astype("float32")


class Scaled(nn.Module):
    """Parameters in lists and dicts, an integer buffer, a plain attribute, keyword arguments, several results."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(3))})
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.power = 2

    def forward(self, x, *, scale=1.0):
        for w in self.weights:
            x = x * w
        x = (x[:, self.order] + self.named["shift"]) * scale
        return {"x": x, "powers": (x**self.power, [x.sum()])}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 5), nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(4, 5, 2, batch_first=True, **options)

    def forward(self, x):
        return self.rnn(x)[0]


MODULES = {
    "nested": (Scaled, floats(4, 3)),
    "tied": (Tied, floats(4, 5)),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), floats(2, 6, 4)),
    "gru": (lambda: Recurrent(nn.GRU), floats(2, 6, 4)),
    "attention": (Attention, floats(2, 5, 8)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
        floats(2, 5, 8),
    ),
    "embedding": (lambda: nn.EmbeddingBag(10, 4), np.array([[1, 2], [2, 9]])),
    "sparse embedding": (lambda: nn.Embedding(10, 4, sparse=True), np.array([[1, 2], [2, 9]])),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)),
        floats(2, 3, 6, 6),
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), floats(5, 4)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), floats(5, 4)),
    "float64": (lambda: nn.Linear(4, 3).double(), floats(5, 4).astype("float64")),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64), floats(5, 4).astype("complex64")),
    "compiled": (lambda: torch.compile(nn.Linear(4, 3), backend="eager"), floats(5, 4)),
}


def tensors(tree):
    """Return the tensors of a result, as arrays."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [x for branch in tree for x in tensors(branch)]
    return [tree.detach().numpy() if isinstance(tree, torch.Tensor) else tree.numpy()]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("name", MODULES)
def test_values_gradients_and_state_are_the_modules_own(name, training, graph):
    make, x = MODULES[name]
    torch.manual_seed(1)
    module = make()
    twin = copy.deepcopy(module).train(training)
    native = twin(torch.from_numpy(x))
    loss = sum(y.abs().square().sum() for y in torch.utils._pytree.tree_leaves(native))
    loss.backward()
    bridged = polybridge.wrap(module, dst="tensorflow")

    def step():
        with tf.GradientTape() as tape:
            out = bridged(tf.constant(x), training=training)
            total = tf.add_n([tf.cast(tf.reduce_sum(tf.abs(y) ** 2), "float64") for y in tf.nest.flatten(out)])
        return out, tape.gradient(total, bridged.params)

    out, gradients = (tf.function(step) if graph else step)()
    for found, expected in zip(tensors(out), tensors(native), strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    twin = getattr(twin, "_orig_mod", twin)
    for parameter, expected in twin.named_parameters():
        gradient = expected.grad.to_dense() if expected.grad.is_sparse else expected.grad
        np.testing.assert_allclose(tf.convert_to_tensor(gradients[parameter]), gradient, 1e-4, 1e-5)
    for buffer, expected in twin.named_buffers():
        np.testing.assert_allclose(bridged.state[buffer], expected, 1e-5, 1e-6)


def test_a_tied_weight_is_one_variable():
    bridged = polybridge.wrap(Tied(), dst="tensorflow")
    assert list(bridged.params) == ["encoder.weight", "encoder.bias", "decoder.bias"]


def test_the_module_itself_is_left_as_it_is():
    module = Recurrent(nn.LSTM)
    before = copy.deepcopy(module.state_dict())
    flat = module.rnn._flat_weights
    bridged = polybridge.wrap(module, dst="tensorflow")
    generator = torch.get_rng_state()
    bridged.params["rnn.weight_ih_l0"].assign_add(tf.ones([20, 4]))
    bridged(floats(2, 6, 4), training=False)
    assert module.training and module.rnn._flat_weights is flat
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_lstms_lend_their_weights_without_a_copy():
    bridged, x = polybridge.wrap(nn.LSTM(4, 5, 2), dst="tensorflow"), tf.constant(floats(6, 2, 4))
    for _ in range(3):
        bridged(x)
    with count_crossings() as counted:
        bridged(x)
    assert (counted.crossings, counted.copies) == (12, 0)  # eight weights, the input and three results


def test_hooks_run_once_per_call():
    module, calls = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    polybridge.wrap(module, dst="tensorflow")(floats(1, 2), training=True)
    assert calls == ["before", "after"]


def test_each_mode_is_as_it_was_when_the_module_was_wrapped():
    modes = []

    class Mode(nn.Module):
        def forward(self, x):
            modes.append(self.training)
            return x

    def modes_of(module):
        bridged = polybridge.wrap(module, dst="tensorflow")
        modes.clear()
        bridged(floats(1), training=True)
        bridged(floats(1), training=False)
        return list(modes)

    assert modes_of(Mode()) == [True, False]
    assert modes_of(Mode().eval()) == [True, False]
    assert modes_of(nn.Sequential(Mode(), Mode().eval())) == [True, False, False, False]
    sampling = nn.Sequential(Mode(), Mode()).eval()
    sampling[0].train()
    assert modes_of(sampling) == [True, True, True, False]


def test_a_module_that_chooses_what_it_trains_is_asked():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.norm(x)

    module = Partly().eval()
    bridged = polybridge.wrap(module, dst="tensorflow")
    bridged(floats(5, 3), training=True)
    assert not module.training and bridged.state["norm.num_batches_tracked"].numpy() == 0


def test_state_that_evaluation_changes_is_kept():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("total", torch.zeros(3))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.count += 1
            self.total = self.total + x.sum(0)
            return torch.batch_norm(x, None, None, self.mean, torch.ones(3), True, 1.0, 1e-5, False)

    x = floats(4, 3)
    bridged = polybridge.wrap(Counter(), dst="tensorflow")
    for _ in range(2):
        bridged(x, training=False)
    assert bridged.state["count"].numpy() == 2
    np.testing.assert_allclose(bridged.state["total"], 2 * x.sum(0), 1e-5)
    np.testing.assert_allclose(bridged.state["mean"], x.mean(0), 1e-5)


@pytest.mark.parametrize("seeds", [((0, 1), (0, 2)), ((1, 0), (2, 0))])
def test_both_halves_of_a_seed_matter(seeds):
    functional = polybridge.wrap(nn.Dropout(0.5), dst="tensorflow")._bridge.functional
    weights = [polybridge.Weights({}, {}, torch.tensor(seed, dtype=torch.uint32)) for seed in (*seeds, seeds[0])]
    one, other, again = (functional.run(torch.ones(100), _weights=w, _training=True)[0] for w in weights)
    assert not torch.equal(one, other) and torch.equal(one, again)


def test_threads_draw_from_their_own_seeds():
    functional = polybridge.wrap(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), dst="tensorflow")._bridge.functional
    seeds = [torch.tensor([3, i], dtype=torch.uint32) for i in range(24)]
    x = torch.ones(100_000)  # long enough for torch to let other threads run

    def call(seed):
        return functional.run(x, _weights=polybridge.Weights({}, {}, seed), _training=True)[0]

    alone = list(map(call, seeds))
    generator = torch.get_rng_state()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(call, seeds))
    assert all(map(torch.equal, alone, together)) and torch.equal(torch.get_rng_state(), generator)


def test_a_scripted_module_is_refused():
    with pytest.warns(DeprecationWarning):
        module = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(polybridge.UnsupportedModuleError, match="TorchScript has compiled it"):
        polybridge.wrap(nn.Sequential(module), dst="tensorflow")


def test_threads_can_share_a_module():
    module = nn.Linear(3, 3)
    bridged = [polybridge.wrap(copy.deepcopy(module) if i else module, dst="tensorflow") for i in range(2)]
    bridged[1] = polybridge.wrap(module, dst="tensorflow")
    xs = [floats(64, 3) for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: bridged[i % 2](xs[i]).numpy(), range(40)))
    for x, y in zip(xs, found, strict=True):
        np.testing.assert_allclose(y, module(torch.from_numpy(x)).detach(), 1e-5, 1e-6)


class Counting(nn.Module):
    """Puts a new tensor in the place of its buffer at each call, and one in an empty place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


@pytest.mark.parametrize("dst", ["keras", "tf"])
def test_what_the_source_holds_now_is_synchronised(dst):
    """Native use of a module, `load_state_dict(assign=True)` and `Module.to` put other tensors in its places."""
    net = Counting()
    bridged = polybridge.wrap(net, dst=dst)
    net(torch.ones(2, 3)), net(torch.ones(2, 3))
    bridged.sync_from_source()
    assert bridged.state["calls"].numpy() == 2
    net.load_state_dict({name: torch.full_like(x, 5) for name, x in net.state_dict().items()}, assign=True)
    bridged.sync_from_source()
    assert bridged.params["linear.weight"].numpy().max() == bridged.state["calls"].numpy() == 5
    bridged(tf.ones((2, 3)), training=True)
    bridged.params["linear.weight"].assign(tf.fill((3, 3), 7.0))
    net.double()
    bridged.sync_to_source()
    assert (net.calls, net.linear.weight[0, 0]) == (6, 7)


def tied(net):
    net[1].weight = net[0].weight


def untied(net):
    net[2].bias = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.append(nn.Linear(3, 4)),
        lambda net: net.pop(2),
        lambda net: net.__setitem__(0, nn.Linear(3, 3)),
        lambda net: parametrizations.weight_norm(net[0]),
        lambda net: setattr(net[1], "bias", nn.Parameter(torch.zeros(3))),
        lambda net: setattr(net[0], "bias", None),
        tied,
        untied,
    ],
    ids=["append", "remove", "replace", "parametrize", "add a bias", "drop a bias", "tie", "untie"],
)
def test_a_source_that_was_rebuilt_has_to_be_wrapped_again(change):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    net[2].bias = net[0].bias
    bridged = polybridge.wrap(net, dst="tf")
    change(net)
    for use in (lambda: bridged(tf.ones((2, 3))), bridged.sync_to_source, bridged.sync_from_source):
        with pytest.raises(polybridge.WeightsError, match=r"Sequential.*Wrap it again"):
            use()
    again = polybridge.wrap(net, dst="tf")
    assert again(tf.ones((2, 3))).numpy().tobytes() == net(torch.ones(2, 3)).detach().numpy().tobytes()


def test_a_buffer_that_is_made_late_is_warned_of():
    net = Counting()
    bridged = polybridge.wrap(net, dst="tf")
    net.last = torch.ones(3)
    with pytest.warns(polybridge.DetachedStateWarning, match=r"Counting.*last"):
        bridged(tf.ones((2, 3)))


class Checkpointed(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return (
            torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        )


@pytest.mark.parametrize("wrapper", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_checkpoints_in_a_module_compute_again_with_the_weights_of_the_call(wrapper):
    """And leave the source's own statistics alone, and count the destination's once."""
    x, found = tf.constant(floats(5, 4)), []
    weights = {name: floats(*p.shape) for name, p in Checkpointed(False).named_parameters()}
    for checkpoints in (False, True):
        net = Checkpointed(checkpoints)
        before = copy.deepcopy(net.state_dict())
        layer = polybridge.wrap(net, dst="keras")
        for name, value in weights.items():
            layer.params[name].assign(value)
        layer.seed_generators[0].state.assign([3, 4])

        @wrapper
        def step(layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 2)
            return tape.gradient(loss, [x, *layer.trainable_variables])

        found.append([*step(), *(v.value for v in layer.state.values())])
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    for plain, checkpointed in zip(*found, strict=True):
        np.testing.assert_allclose(checkpointed, plain, rtol=1e-4, atol=1e-5)
