"""Checkpoints, saved-tensor hooks and the other features of torch's autograd graph."""

import copy
import gc
import weakref

import pytest
import tensorflow as tf
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.func import vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import polybridge
from polybridge.core import residuals
from tests.torch_dst.sources import TENSORFLOW, native, values, wrapped


def fn(m, x):
    """Of all tests here."""
    return m.sin(x) * x


class Counted:
    """A TensorFlow function that counts its runs and leaves a weak reference to what it saved at each."""

    def __init__(self):
        self.saved = []
        self.wrapped = polybridge.wrap(self, src="tf", dst="torch")

    def __call__(self, x):
        y = x * 2.0
        self.saved.append(weakref.ref(y))
        return tf.sin(y) * y

    def alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self.saved)


def by_hand(x):
    return (2 * x).sin() * 2 * x


def gradient(f, x):
    x = x.detach().requires_grad_()
    f(x).sum().backward()
    return x.grad


copying = [
    pytest.param(save_on_cpu, id="save_on_cpu"),
    pytest.param(lambda: saved_tensors_hooks(torch.clone, lambda x: x), id="clone"),
    pytest.param(lambda: saved_tensors_hooks(lambda x: x.tolist(), _tensor), id="to Python and back"),
]


def _tensor(listed):
    return torch.tensor(listed, dtype=torch.int64 if isinstance(listed[0], int) else torch.float64)


# Checkpoints.


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_the_gradient_through_a_checkpoint(source, reentrant):
    x = values(3)
    found = gradient(lambda x: checkpoint(wrapped(source, fn), x.cos(), use_reentrant=reentrant), x)
    torch.testing.assert_close(found, gradient(lambda x: native(fn)(x.cos()), x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_runs_the_function_twice(reentrant):
    f = Counted()
    gradient(lambda x: checkpoint(f.wrapped, x, use_reentrant=reentrant), values(3))
    assert len(f.saved) == 2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_keeps_no_residual_of_the_first_run(reentrant):
    f = Counted()
    y = checkpoint(f.wrapped, values(3).requires_grad_(), use_reentrant=reentrant)
    assert f.alive() == 0
    y.sum().backward()
    del y
    assert f.alive() == 0


def test_a_checkpoint_lends_memory_as_ever():
    """It runs the function again on what it has saved, so that what the hooks get needs no copy."""
    f, x = polybridge.wrap(tf.sin, src="tf", dst="torch"), torch.ones(1000, requires_grad=True)
    for _ in range(3):  # earns trust
        torch.autograd.grad(f(x).sum(), x)
    with polybridge.observe.count_crossings() as plain:
        f(x)
    with polybridge.observe.count_crossings() as counted:
        checkpoint(f, x, use_reentrant=False)
    assert counted.copies == plain.copies


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_of_several_segments(reentrant):
    f, x = wrapped(TENSORFLOW, fn), values(3)
    found = gradient(lambda x: checkpoint_sequential([f, torch.cos, f, f], 2, x, use_reentrant=reentrant), x)
    g = native(fn)
    torch.testing.assert_close(found, gradient(lambda x: g(g(g(x).cos())), x))


def test_a_second_derivative_through_a_checkpoint():
    def second(f, x):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    x = values(3).requires_grad_()
    found = second(lambda x: checkpoint(wrapped(TENSORFLOW, fn), x, use_reentrant=False), x)
    torch.testing.assert_close(found, second(native(fn), x))


def test_a_checkpoint_under_hooks_that_copy():
    x = values(3)
    with save_on_cpu():
        found = gradient(lambda x: checkpoint(wrapped(TENSORFLOW, fn), x, use_reentrant=False), x)
    torch.testing.assert_close(found, gradient(native(fn), x))


# Saved-tensor hooks.


@pytest.mark.parametrize("hooks", copying)
def test_the_gradient_under_hooks_that_copy(source, hooks):
    x = values(3)
    with hooks():
        found = gradient(wrapped(source, fn), x)
    torch.testing.assert_close(found, gradient(native(fn), x))


@pytest.mark.parametrize("hooks", copying)
def test_the_backward_after_the_hooks(hooks):
    x = values(3).requires_grad_()
    with hooks():
        y = wrapped(TENSORFLOW, fn)(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], gradient(native(fn), x))


@pytest.mark.parametrize("hooks", copying)
def test_hooks_that_copy_leave_no_residual(hooks):
    f, before = Counted(), set(residuals._residuals)
    with hooks():
        torch.testing.assert_close(gradient(f.wrapped, values(3)), gradient(by_hand, values(3)))
    assert f.alive() == 0 and set(residuals._residuals) <= before


@pytest.mark.parametrize("src", ["tf", "jax"])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_input_that_is_written_to_under_hooks_that_allow_it(src, mapped):
    f = polybridge.wrap(lambda x, w: x * w, src=src, dst="torch")
    f = vmap(f) if mapped else f
    for _ in range(4):  # after the first calls the function is trusted with the caller's own memory
        x, w = torch.arange(8.0), torch.ones(8, requires_grad=True)
        with allow_mutation_on_saved_tensors():
            y = f(x, w)
            x.zero_()
            y.sum().backward()
        assert w.grad.tolist() == list(range(8))


def test_an_input_that_hooks_have_copied_may_be_written_to():
    f = polybridge.wrap(lambda x, w: x * w, src="tf", dst="torch")
    for _ in range(4):  # as above
        x, w = torch.arange(8.0), torch.ones(8, requires_grad=True)
        with saved_tensors_hooks(torch.clone, lambda x: x):
            y = f(x, w)
        x.zero_()
        y.sum().backward()
        assert w.grad.tolist() == list(range(8))


@pytest.mark.parametrize("hooks", copying[1:])  # `save_on_cpu` copies nothing that is there already
def test_a_batch_under_hooks_that_copy_is_refused(hooks):
    x = values(2, 3).requires_grad_()
    with hooks():
        y = vmap(wrapped(TENSORFLOW, fn))(x)
    with pytest.raises(polybridge.ResidualError, match="saved-tensor hook"):
        y.sum().backward()


def test_a_batch_under_hooks_that_pass_tensors_on():
    x = values(2, 3)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        found = gradient(vmap(wrapped(TENSORFLOW, fn)), x)
    torch.testing.assert_close(found, gradient(native(fn), x))


def inside(source, around):
    """Return a torch function as a torch function, by way of a source."""
    lent = polybridge.wrap(around, src="torch", dst=source)
    return polybridge.wrap(lambda x: lent(x) * x, src=source, dst="torch")


@pytest.mark.parametrize("middle", ["tf", "jax"])
def test_hooks_see_nothing_of_what_torch_does_inside_of_another_framework(middle):
    shapes = []
    f, x = inside(middle, lambda x: x.sin().exp().outer(x.cos()).sum(1)), values(3).float()
    with saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        found = gradient(f, x)
    torch.testing.assert_close(found, gradient(lambda x: x.sin().exp().outer(x.cos()).sum(1) * x, x))
    assert shapes == [(3,), (1,)]  # the input, and the token


@pytest.mark.parametrize("middle", ["tf", "jax"])
def test_a_checkpoint_of_what_differentiates_torch_inside_of_another_framework(middle):
    def derivative(x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)[0]

    f, x = inside(middle, derivative), values(3).float()
    found = gradient(lambda x: checkpoint(f, x, use_reentrant=False), x)
    torch.testing.assert_close(found, gradient(lambda x: (x.sin() + x * x.cos()) * x, x))


@pytest.mark.parametrize("middle", ["tf", "jax"])
def test_forward_mode_inside_of_another_framework(middle):
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, x).sin()).tangent

    f, x = inside(middle, tangent), values(3).float()
    torch.testing.assert_close(gradient(f, x), gradient(lambda x: x * x.cos() * x, x))


def test_disabled_hooks(source):
    x = values(3)
    with disable_saved_tensors_hooks("none here"):
        found = gradient(wrapped(source, fn), x)
    torch.testing.assert_close(found, gradient(native(fn), x))


# Grad modes.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_without_gradients(source, mode):
    x = values(3).requires_grad_()
    with mode():
        y = wrapped(source, fn)(x)
        torch.testing.assert_close(y, native(fn)(x))
    assert not y.requires_grad


def test_a_result_of_inference_mode_is_an_inference_tensor(source):
    with torch.inference_mode():
        assert wrapped(source, fn)(values(3)).is_inference()


def test_an_input_from_inference_mode_is_refused_as_by_torch():
    with torch.inference_mode():
        x = values(3)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        wrapped(TENSORFLOW, lambda m, x, w: m.sin(x) * w)(x, values(3).requires_grad_())


# The graph.


def test_a_result_without_a_cotangent_gives_none_and_no_zeros_to_what_it_alone_depends_on(tensorflow):
    x, w = values(3).requires_grad_(), values(3).requires_grad_()
    y, _ = wrapped(tensorflow, lambda m, x, w: (m.sin(x), m.exp(w)))(x, w)
    gx, gw = torch.autograd.grad(y.sum(), [x, w], allow_unused=True)
    torch.testing.assert_close(gx, x.detach().cos())
    assert gw is None


def test_results_refuse_deepcopy_as_torchs_own(source):
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(wrapped(source, fn)(values(3).requires_grad_()))


def test_results_without_a_graph_can_be_copied(source):
    y = wrapped(source, fn)(values(3))
    torch.testing.assert_close(copy.deepcopy(y), y)


def test_anomaly_detection_passes(source):
    with torch.autograd.set_detect_anomaly(True):
        torch.testing.assert_close(gradient(wrapped(source, fn), values(3)), gradient(native(fn), values(3)))


@pytest.mark.filterwarnings("ignore:Error detected in _CrossingBackward")
def test_anomaly_detection_finds_nan(tensorflow):
    f = wrapped(tensorflow, lambda m, x: tf.sqrt(x - x))
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        gradient(f, values(3))


def test_a_hook_on_a_result_changes_its_gradient(source):
    x = values(3).requires_grad_()
    y = wrapped(source, fn)(x)
    y.register_hook(lambda ct: 2 * ct)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * gradient(native(fn), x))


def test_a_result_retains_its_gradient(source):
    y = wrapped(source, fn)(values(3).requires_grad_())
    y.retain_grad()
    y.sum().backward()
    assert y.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("order", [1, 2])
def test_a_batch_of_cotangents(source, order):
    def rows(f, x):
        y = f(x)
        if order == 2:
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(y, x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)[0]

    x = values(3).requires_grad_()
    torch.testing.assert_close(rows(wrapped(source, fn), x), rows(native(fn), x))


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_jacobians_of_torch_autograd_functional(source, strategy):
    def derivatives(f):
        jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True, strategy=strategy)
        hessian = torch.autograd.functional.hessian(
            lambda x: f(x).sum(), x, vectorize=True, outer_jacobian_strategy=strategy
        )
        return jacobian, hessian

    x = values(3)
    torch.testing.assert_close(derivatives(wrapped(source, fn)), derivatives(native(fn)))
