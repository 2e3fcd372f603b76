"""Asks that a `tf.Module` or a SavedModel is computed and trained here as TensorFlow does it, and left alone."""

import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.modules import keras_models
from tests.modules.keras_models import Affine


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def batch(rng, *shape):
    return rng.standard_normal(shape or (5, 3)).astype("float32")


class Scale(tf.Module):
    def __init__(self, fn=lambda x, w: x * w):
        super().__init__()
        self.w = tf.Variable([1.0, 2.0, 3.0])
        self.fn = fn

    def __call__(self, x):
        return self.fn(x, self.w)


def test_a_module_trains_as_in_tensorflow(rng):
    bridged, native = Affine(), Affine()
    module = polybridge.wrap(bridged, dst="torch")
    assert [name for name, _ in module.named_parameters()] == ["w", "b"]
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(5):
        x = batch(rng)
        optimizer.zero_grad()
        module(torch.from_numpy(x)).square().mean().backward()
        optimizer.step()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(native(x) ** 2)
        for v, g in zip([native.w, native.b], tape.gradient(loss, [native.w, native.b]), strict=True):
            v.assign_sub(0.1 * g)
    assert not np.allclose(bridged.w, native.w)
    module.sync_to_source()
    np.testing.assert_allclose(bridged.w, native.w, rtol=1e-5, atol=1e-6)


def test_both_orders_of_derivatives_in_float64(rng):
    module = polybridge.wrap(
        Scale(lambda x, w: tf.sin(x * tf.cast(w, x.dtype)) * tf.cast(w, x.dtype) ** 2), dst="torch"
    )
    x = torch.from_numpy(rng.standard_normal((2, 3))).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,)) and torch.autograd.gradgradcheck(module, (x,))
    module = polybridge.wrap(Affine(2, tf.float64), dst="torch")
    names, values = zip(*((n, p.detach().clone().requires_grad_()) for n, p in module.named_parameters()), strict=True)

    def fn(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,)).sin()

    assert torch.autograd.gradcheck(fn, (torch.from_numpy(rng.standard_normal((2, 2))).requires_grad_(), *values))


def test_variables_that_the_first_call_makes_are_parameters_after_it(rng):
    class Late(tf.Module):
        w = None

        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(tf.ones((3, 2)))
                self.calls = tf.Variable(0, trainable=False)
            self.calls.assign_add(1)
            return x @ self.w

    module = polybridge.wrap(Late(), dst="torch")
    with pytest.raises(polybridge.UnbuiltError, match="Call it once"):
        torch.optim.SGD(module.parameters())
    x = torch.from_numpy(batch(rng))
    module(x).sum().backward()
    assert int(module.calls) == 1
    torch.testing.assert_close(module.w.grad, x.sum(0)[:, None].expand(3, 2))


def test_variables_made_beside_others_are_announced(rng):
    class Partly(tf.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = tf.Variable(2.0), None

        def __call__(self, x):
            if self.second is None:
                self.second = tf.Variable(3.0)
            return x * self.first * self.second

    module = polybridge.wrap(Partly(), dst="torch")
    with pytest.warns(polybridge.DetachedStateWarning, match=r"first call: second.*after the first call"):
        y = module(torch.ones(2))
    y.sum().backward()
    assert float(module.first.grad) == 6 and float(module.second.grad) == 4


def test_a_module_is_called_once_a_call(rng):
    calls = []

    def fn(x, w):
        calls.append(1)
        return x * w

    module = polybridge.wrap(Scale(fn), dst="torch")
    for _ in range(3):
        module(torch.ones(3)).sum().backward()
    assert len(calls) == 3


def test_state_changes_once_a_call_and_is_no_parameter(rng):
    class Counter(tf.Module):
        def __init__(self):
            super().__init__()
            self.count = tf.Variable(0)  # trainable by default, but no optimiser takes integers
            self.mean = tf.Variable(0.0, trainable=False)

        def __call__(self, x, training):
            if training:
                self.count.assign_add(1)
                self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x))
            return x - self.mean

    source = Counter()
    module = polybridge.wrap(source, dst="torch")
    assert not list(module.parameters())
    for _ in range(3):
        module(torch.ones(4))
    module.eval()(torch.ones(4))
    assert (int(module.count), float(module.mean), int(source.count)) == (3, 0.875, 0)


def test_a_module_that_assigns_to_a_weight_is_refused():
    class Mean(tf.Module):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable(0.0)

        def __call__(self, x):
            self.mean.assign(tf.reduce_mean(x))
            return x - self.mean

    source = Mean()
    with pytest.raises(polybridge.MutationError, match=r"'mean'.*trainable=False"):
        polybridge.wrap(source, dst="torch")(torch.ones(3))
    assert float(source.mean) == 0


def test_a_variable_on_two_paths_is_one_parameter():
    class Twice(tf.Module):
        def __init__(self):
            super().__init__()
            self.one = tf.Variable(2.0)
            self.other = self.one

        def __call__(self, x):
            return x * self.one * self.other

    module = polybridge.wrap(Twice(), dst="torch")
    (parameter,) = module.parameters()
    module(torch.ones(2)).sum().backward()
    assert float(parameter.grad) == 8


def test_a_weight_of_two_modules_gets_the_sum_of_gradients():
    one, other = Scale(), Scale()
    other.w = one.w
    a, b = polybridge.wrap(one, dst="torch"), polybridge.wrap(other, dst="torch")
    assert a.w is b.w
    (a(torch.ones(3)).sum() + b(torch.full((3,), 2.0)).sum()).backward()
    assert a.w.grad.tolist() == [3, 3, 3]


def test_another_dtype_than_the_variable_s_is_refused(rng):
    module = polybridge.wrap(Affine(), dst="torch").double()
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"'w' in float64.*float32.*one dtype for good"):
        module(torch.from_numpy(batch(rng)).double())


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_variables_of_other_dtypes_are_parameters(dtype):
    module = polybridge.wrap(Affine(2, tf.float32 if dtype == "complex64" else dtype), dst="torch")
    assert module(torch.ones(1, 2, dtype=module.w.dtype)).dtype is module.w.dtype
    if dtype == "complex64":
        source = tf.Module()
        source.w = tf.Variable([1 + 2j], dtype=dtype)
        assert polybridge.wrap(CallableModule(source), dst="torch").inner.w.requires_grad


class CallableModule(tf.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        return x * self.inner.w


# What goes wrong inside, and who else computes.


def test_an_error_inside_restores_the_variables():
    def fn(x, w):
        raise KeyError("inside")

    source = Scale(fn)
    module = polybridge.wrap(source, dst="torch")
    with torch.no_grad():
        module.w.fill_(7)
    with pytest.raises(KeyError, match="inside"):
        module(torch.ones(3))
    assert source.w.numpy().tolist() == [1, 2, 3]


def test_a_module_that_calls_itself_with_other_weights():
    def fn(x, w):
        if float(x[0]) > 0:
            inner = other(torch.zeros(3))  # the same source, other weights, in the middle of a call
            seen.append(inner.detach())
        return x * w + w

    source, seen = Scale(fn), []
    module = polybridge.wrap(source, dst="torch")
    other = polybridge.wrap(source, dst="torch", copy=True)
    other._parameters["w"] = torch.nn.Parameter(torch.full((3,), 5.0))
    y = module(torch.full((3,), 2.0))
    assert seen[0].tolist() == [5, 5, 5] and y.tolist() == [3, 6, 9]
    y.sum().backward()
    assert module.w.grad.tolist() == [3, 3, 3]
    assert source.w.numpy().tolist() == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::polybridge.DetachedStateWarning")  # each closes over the other
def test_two_modules_that_call_each_other_on_two_threads_never_wait_for_each_other():
    inside = threading.Barrier(2, timeout=30)

    def cross(of):
        def fn(x, w):
            if float(x[0]) == 2:
                inside.wait()
                return x * w + polybridge.convert(of()(torch.ones(3)).detach(), "tf")
            return x * w

        return fn

    one, other = Scale(cross(lambda: b)), Scale(cross(lambda: a))
    a, b = polybridge.wrap(one, dst="torch"), polybridge.wrap(other, dst="torch")
    found = {}
    threads = [
        threading.Thread(target=lambda m=m, n=n: found.update({n: m(torch.full((3,), 2.0)).tolist()}), daemon=True)
        for n, m in enumerate((a, b))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: [3, 6, 9], 1: [3, 6, 9]}
    assert one.w.numpy().tolist() == other.w.numpy().tolist() == [1, 2, 3]


def test_threads_compute_with_their_own_weights(rng):
    source = Affine()
    x, found = torch.from_numpy(batch(rng)), {}
    module = polybridge.wrap(source, dst="torch")

    def compute(number):
        mine = polybridge.wrap(source, dst="torch")
        for path in ("w", "b"):
            mine._parameters[path] = torch.nn.Parameter((number + 1) * module._parameters[path].detach())
        found[number] = [mine(x).detach() for _ in range(20)]

    threads = [threading.Thread(target=compute, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, ys in found.items():
        expected = (number + 1) * module(x).detach()
        for y in ys:
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(found) == 3


# SavedModels.


def test_a_saved_module_trains(rng, tmp_path):
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.layer = Affine()

        @tf.function(input_signature=[tf.TensorSpec((None, 3))])
        def __call__(self, x):
            return tf.tanh(self.layer(x))

    net = Net()
    tf.saved_model.save(net, str(tmp_path))
    module = polybridge.wrap(tf.saved_model.load(str(tmp_path)), dst="torch")
    assert {name for name, _ in module.named_parameters()} == {"layer.w", "layer.b"}
    x = batch(rng)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(x) ** 2)
    found = module(torch.from_numpy(x)).square().sum()
    found.backward()
    np.testing.assert_allclose(float(found), float(loss), rtol=1e-5)
    np.testing.assert_allclose(module.layer.w.grad, tape.gradient(loss, net.layer.w), rtol=1e-4, atol=1e-5)


def test_an_exported_keras_model_trains(rng, tmp_path):
    model = keras_models.mlp()
    model.export(str(tmp_path), verbose=False)
    module = polybridge.wrap(tf.saved_model.load(str(tmp_path)), dst="torch")
    x = batch(rng, 5, 4)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x) ** 2)
    found = module(torch.from_numpy(x)).square().sum()
    found.backward()
    np.testing.assert_allclose(float(found), float(loss), rtol=1e-5)
    assert "sequential.dense.kernel" in {re.sub(r"_\d+", "", name) for name, _ in module.named_parameters()}
    grads = {tuple(p.shape): p.grad for p in module.parameters()}
    for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
        np.testing.assert_allclose(grads[tuple(v.shape)], g, rtol=1e-4, atol=1e-5)


def test_a_saved_model_without_a_call_names_its_signatures(tmp_path):
    net = tf.Module()
    net.w = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec(())])
    def double(x):
        return x * net.w

    tf.saved_model.save(net, str(tmp_path), signatures={"double": double.get_concrete_function()})
    with pytest.raises(polybridge.NotCallableError, match=r"its signatures: double\..*signatures"):
        polybridge.wrap(tf.saved_model.load(str(tmp_path)), dst="torch")


def test_an_embedding_s_slices_become_a_dense_gradient():
    class Lookup(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = tf.Variable(tf.zeros((5, 2)))

        def __call__(self, ids):
            return tf.gather(self.table, ids)

    module = polybridge.wrap(Lookup(), dst="torch")
    module(torch.tensor([1, 1, 3])).sum().backward()
    assert module.table.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


def test_a_keras_layer_inside_of_a_module_is_part_of_it(rng):
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(2)
            self.layer.build((None, 3))

        def __call__(self, x):
            return self.layer(x)

    net = Net()
    module, x = polybridge.wrap(net, dst="torch"), batch(rng)
    module(torch.from_numpy(x)).sum().backward()
    assert {name for name, _ in module.named_parameters()} == {"layer.kernel", "layer.bias"}
    assert all(p.grad is not None for p in module.parameters())


class Nested(tf.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.shift = Scale(), tf.Variable(1.0)

    def __call__(self, x):
        return self.inner(x) + self.shift


@pytest.mark.parametrize(("name", "made"), [("inner", Scale), ("shift", lambda: tf.Variable(2.0))])
def test_a_source_that_was_rebuilt_has_to_be_wrapped_again(name, made):
    source = Nested()
    module = polybridge.wrap(source, dst="torch")
    module(torch.ones(3))
    setattr(source, name, made())
    for use in (lambda: module(torch.ones(3)), module.sync_to_source):
        with pytest.raises(polybridge.WeightsError, match=r"Nested.*Wrap it again"):
            use()
    assert polybridge.wrap(source, dst="torch")(torch.ones(3)).tolist() == source(tf.ones(3)).numpy().tolist()
