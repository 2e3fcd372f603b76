"""Asks that a module of Keras is one of torch's own: its weights, optimisers, copies, hooks and transforms."""

import copy
import gc
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn.utils import clip_grad_norm_, parametrize, prune

import polybridge
from tests.modules import keras_models


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def batch(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape or (5, 4)).astype(dtype)


def keras_step(model, x, rate, training=True):
    """One step of SGD on the mean square of the result, by Keras's own means."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=training) ** 2)
    for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
        v.assign_sub(rate * g)


def twins(make):
    """Return two models of the same weights."""
    one, other = make(), make()
    other.set_weights(one.get_weights())
    return one, other


def step(module, x, optimizer):
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


def test_parameters_have_readable_names():
    module = polybridge.wrap(keras_models.normalised(), dst="torch")
    assert [name for name, _ in module.named_parameters()] == [
        "dense.kernel", "dense.bias", "batch_normalization.gamma", "batch_normalization.beta",
        "dense_1.kernel", "dense_1.bias",
    ]  # fmt: skip
    assert {name for name, _ in module.named_buffers()} == {
        "batch_normalization.moving_mean", "batch_normalization.moving_variance",
    }  # fmt: skip


def test_a_state_dict_of_one_instance_loads_strictly_into_another(rng):
    one, other = (polybridge.wrap(keras_models.normalised(), dst="torch") for _ in range(2))
    x = torch.from_numpy(batch(rng))
    for _ in range(3):
        step(one, x, torch.optim.SGD(one.parameters(), 0.1))
    other.load_state_dict(one.state_dict(), strict=True)
    assert torch.equal(one.eval()(x), other.eval()(x))


@pytest.mark.parametrize("make", [keras_models.mlp, keras_models.normalised], ids=lambda make: make.__name__)
def test_training_equals_that_of_keras(make, rng):
    bridged, native = twins(make)
    module = polybridge.wrap(bridged, dst="torch")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(10):
        x = batch(rng)
        step(module, torch.from_numpy(x), optimizer)
        keras_step(native, x, 0.1)
    assert module.sync_to_source() is bridged
    for mine, theirs in zip(bridged.get_weights(), native.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_source_is_untouched_until_it_is_synchronised_bit_for_bit(rng):
    model = keras_models.normalised()
    before = model.get_weights()
    module = polybridge.wrap(model, dst="torch")
    step(module, torch.from_numpy(batch(rng)), torch.optim.Adam(module.parameters()))
    assert all(map(np.array_equal, model.get_weights(), before))
    module.sync_to_source()
    for name, tensor in module.state_dict().items():
        owner, variable = name.split(".")
        index = {"dense": 0, "batch_normalization": 1, "dense_1": 2}[owner]
        assert getattr(model.layers[index], variable).numpy().tobytes() == tensor.numpy().tobytes()
    model.set_weights(before)
    module.sync_from_source()
    assert torch.equal(module.dense.kernel.detach(), torch.from_numpy(before[0]))


def test_train_and_eval_are_keras_training(rng):
    model = keras_models.normalised()
    module, x = polybridge.wrap(model, dst="torch"), batch(rng)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), model(x, training=True), rtol=1e-5, atol=1e-6)
    module.eval()
    module.sync_to_source()
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), model(x, training=False), rtol=1e-5, atol=1e-6)
    given = module(torch.from_numpy(x), training=True)
    np.testing.assert_allclose(given.detach(), model(x, training=True), rtol=1e-5, atol=1e-6)


def test_a_frozen_layer_arrives_frozen():
    model = keras_models.normalised()
    model.layers[0].trainable = False
    module = polybridge.wrap(model, dst="torch")
    assert not module.dense.kernel.requires_grad and isinstance(module.dense.kernel, torch.nn.Parameter)
    assert module.dense_1.kernel.requires_grad


def test_a_backbone_frozen_here_stays_bit_equal(rng):
    backbone = polybridge.wrap(keras_models.mlp(), dst="torch").requires_grad_(False)
    before = {name: x.clone() for name, x in backbone.state_dict().items()}
    net = torch.nn.Sequential(backbone, torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        step(net, torch.from_numpy(batch(rng)), optimizer)
    assert all(torch.equal(x, before[name]) for name, x in backbone.state_dict().items())


def test_parameter_groups_and_clipping_see_the_parameters(rng):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    groups = [{"params": [module.dense.kernel], "lr": 0.0}, {"params": [module.dense_1.kernel], "lr": 0.1}]
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    optimizer = torch.optim.SGD(groups)
    module(torch.from_numpy(batch(rng))).square().sum().backward()
    clip_grad_norm_(module.parameters(), 1e-3)
    norm = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)
    optimizer.step()
    assert torch.equal(module.dense.kernel.detach(), before["dense.kernel"])
    assert not torch.equal(module.dense_1.kernel.detach(), before["dense_1.kernel"])


def test_hooks_run_once_a_call(rng):
    module, seen = polybridge.wrap(keras_models.mlp(), dst="torch"), []
    module.register_forward_pre_hook(lambda *_: seen.append("pre"))
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.dense.kernel.register_hook(lambda g: seen.append(tuple(g.shape)))
    module(torch.from_numpy(batch(rng)).requires_grad_()).sum().backward()
    assert seen[:2] == ["pre", "forward"] and sorted(map(str, seen[2:])) == ["(4, 8)", "backward"]


def test_a_deep_copy_has_weights_of_its_own(rng):
    module = polybridge.wrap(keras_models.normalised(), dst="torch")
    x = torch.from_numpy(batch(rng))
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    before = module(x).detach()
    step(twin, x, torch.optim.SGD(twin.parameters(), 1.0))
    assert torch.equal(module.train()(x).detach(), before)
    assert not torch.equal(twin(x).detach(), before)


def test_an_averaged_model_is_the_mean_of_the_weights(rng):
    module = polybridge.wrap(keras_models.normalised(), dst="torch")
    average = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    x, optimizer = torch.from_numpy(batch(rng)), torch.optim.SGD(module.parameters(), 0.1)
    kernels = []
    for _ in range(3):
        step(module, x, optimizer)
        average.update_parameters(module)
        kernels.append(module.dense.kernel.detach().clone())
    torch.testing.assert_close(average.module.dense.kernel.detach(), sum(kernels) / 3)
    assert average.eval()(x).shape == (5, 2)


def test_a_parametrised_weight_is_what_the_source_computes_with(rng):
    class Double(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    module, x = polybridge.wrap(model, dst="torch"), batch(rng)
    parametrize.register_parametrization(module.dense, "kernel", Double())
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), x @ (2 * kernel) + bias, rtol=1e-5, atol=1e-6)
    module(torch.from_numpy(x)).sum().backward()
    expected = np.repeat(2 * x.sum(0)[:, None], 2, 1)
    np.testing.assert_allclose(module.dense.parametrizations.kernel.original.grad, expected, rtol=1e-5, atol=1e-6)


def test_pruning_holds_while_training(rng):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    prune.l1_unstructured(module.dense, "kernel", amount=0.5)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        step(module, torch.from_numpy(batch(rng)), optimizer)
    module(torch.from_numpy(batch(rng)))
    assert int((module.dense.kernel == 0).sum()) == 16
    torch.testing.assert_close(module.dense.kernel, module.dense.kernel_orig * module.dense.kernel_mask)


def test_functional_call_grad_and_vmap(rng):
    model = keras_models.mlp()
    module, x = polybridge.wrap(model, dst="torch"), torch.from_numpy(batch(rng))
    params = {name: p.detach() for name, p in module.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).square().sum()

    found = torch.func.grad(loss)(params, x)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(x.numpy()) ** 2)
    expected = tape.gradient(value, model.trainable_variables)
    for (name, mine), theirs in zip(found.items(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x.unsqueeze(1))
    torch.testing.assert_close(each["dense.kernel"].sum(0), found["dense.kernel"], rtol=1e-4, atol=1e-5)


def test_derivatives_of_both_orders_in_float64(rng):
    keras.config.set_dtype_policy("float64")
    try:
        model = keras.Sequential(
            [keras.layers.Input((3,), dtype="float64"), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    module = polybridge.wrap(model, dst="torch")
    names = list(dict(module.named_parameters()))
    values = [p.detach().clone().requires_grad_() for p in module.parameters()]
    x = torch.from_numpy(batch(rng, 2, 3, dtype="float64")).requires_grad_()

    def fn(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    for _ in range(2):  # the second time as a graph
        assert torch.autograd.gradcheck(fn, (x, *values))
        assert torch.autograd.gradgradcheck(fn, (x, *values))


def test_a_gradient_penalty_trains_the_weights(rng):
    model = keras_models.mlp()
    module, data = polybridge.wrap(model, dst="torch"), batch(rng)
    for _ in range(3):
        module.zero_grad()
        x = torch.from_numpy(data).requires_grad_()
        (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (g.norm(dim=1) - 1).square().mean().backward()
    with tf.GradientTape() as outer:
        t = tf.constant(data)
        with tf.GradientTape() as inner:
            inner.watch(t)
            y = tf.reduce_sum(model(t))
        g = inner.gradient(y, t)
        penalty = tf.reduce_mean((tf.norm(g, axis=1) - 1) ** 2)
    expected = outer.gradient(penalty, model.trainable_variables)
    for mine, theirs in zip(module.parameters(), expected, strict=True):
        if theirs is None:
            assert mine.grad is None or not mine.grad.any()
        else:
            np.testing.assert_allclose(mine.grad, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_another_dtype_is_another_policy_of_keras(dtype, rng):
    model = keras_models.normalised()
    name = str(dtype).removeprefix("torch.")
    keras.config.set_dtype_policy(name)
    try:
        native = keras_models.normalised(name)
    finally:
        keras.config.set_dtype_policy("float32")
    native.set_weights(model.get_weights())
    module = polybridge.wrap(model, dst="torch").to(dtype)
    x = torch.from_numpy(batch(rng)).to(dtype)
    found = module(x)
    expected = native(polybridge.convert(x, "tf"), training=True)
    assert found.dtype is dtype
    assert torch.equal(found.detach(), polybridge.convert(expected, "torch"))
    found.sum().backward()
    assert all(p.grad.dtype is dtype for p in module.parameters())
    assert module.batch_normalization.moving_mean.dtype is dtype


def test_weights_of_another_dtype_are_not_rounded_into_the_source():
    model = keras_models.mlp()
    before = model.get_weights()
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"'dense.kernel' in float64.*float32"):
        polybridge.wrap(model, dst="torch").double().sync_to_source()
    assert all(map(np.array_equal, model.get_weights(), before))


def test_weights_of_two_dtypes_are_refused(rng):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    module.dense.double()
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"'dense_1.kernel' in float32.*others.*float64"):
        module(torch.from_numpy(batch(rng)))


def test_a_model_that_cannot_be_made_again_refuses_another_dtype(rng):
    class Net(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    net = Net(keras.layers.Dense(2))
    net(batch(rng))
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"float64, but its source holds it in float32"):
        polybridge.wrap(net, dst="torch").double()(torch.from_numpy(batch(rng)))


def test_a_pickle_holds_the_model_and_the_trained_weights(rng, tmp_path):
    module = polybridge.wrap(keras_models.normalised(), dst="torch")
    x = torch.from_numpy(batch(rng))
    step(module, x, torch.optim.SGD(module.parameters(), 0.1))
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again.eval()(x), module.eval()(x))
    assert again.state_dict().keys() == module.state_dict().keys()
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert torch.equal(loaded(x), module(x))


def test_a_factory_is_pickled_by_name(rng):
    module = polybridge.wrap(keras_models.Tied(), dst="torch", factory=keras_models.Tied)
    with pytest.raises(polybridge.UnbuiltError):
        list(module.parameters())
    x = torch.from_numpy(batch(rng))
    module(x)
    data = pickle.dumps(module)
    assert b"keras_models:Tied" in data
    again = pickle.loads(data)
    assert torch.equal(again(x), module(x))


def test_what_cannot_be_pickled_asks_for_a_factory():
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(1.0)

        def __call__(self, x):
            return x * self.w

    with pytest.raises(polybridge.FactoryError, match=r"cannot be saved by itself.*factory="):
        pickle.dumps(polybridge.wrap(Net(), dst="torch"))


def test_compiled_training_equals_eager_training(rng):
    bridged, native = twins(keras_models.normalised)
    module, other = polybridge.wrap(bridged, dst="torch"), polybridge.wrap(native, dst="torch")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (module, other)]
    for _ in range(4):
        x = torch.from_numpy(batch(rng))
        step(compiled, x, optimizers[0])
        step(other, x, optimizers[1])
    for (name, mine), theirs in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    x = torch.from_numpy(batch(rng))
    module.eval(), other.eval()
    torch.testing.assert_close(compiled(x), other(x))


def test_no_parameter_is_copied_to_be_read(rng):
    module = polybridge.wrap(keras_models.mlp(256), dst="torch").eval()
    x = torch.from_numpy(batch(rng)).clone()
    with torch.no_grad():
        for _ in range(3):
            module(x)
        with polybridge.observe.count_crossings() as crossings:
            module(x)
    assert crossings.bytes_copied <= 5 * 2 * 4  # the result


def test_a_weight_of_two_modules_is_one_parameter_with_the_sum_of_gradients(rng):
    shared = keras.layers.Dense(4, use_bias=False)
    one, other = (keras.Sequential([keras.layers.Input((4,)), shared]) for _ in range(2))
    a, b = (polybridge.wrap(model, dst="torch") for model in (one, other))
    (pa,), (pb,) = list(a.parameters()), list(b.parameters())
    assert pa is pb
    x, y = (torch.from_numpy(batch(rng)) for _ in range(2))
    (a(x).sum() + b(y).sum()).backward()
    torch.testing.assert_close(pa.grad, (x.sum(0) + y.sum(0))[:, None].expand(4, 4))


def test_a_tied_weight_is_one_parameter(rng):
    model = keras_models.Tied()
    x = batch(rng)
    model(x)
    module = polybridge.wrap(model, dst="torch")
    (parameter,) = module.parameters()
    module(torch.from_numpy(x)).square().sum().backward()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x) ** 2)
    np.testing.assert_allclose(parameter.grad, tape.gradient(loss, model.encoder.kernel), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_dropped_is_freed(rng):
    module = polybridge.wrap(keras_models.mlp(), dst="torch")
    for _ in range(3):
        module(torch.from_numpy(batch(rng))).sum().backward()
    kernel = weakref.ref(module.dense.kernel)
    del module
    gc.collect()
    assert kernel() is None
