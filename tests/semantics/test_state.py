"""Asks that the function runs in the caller's state, grad mode to denormals, and that its exceptions are its own."""

import contextvars
import traceback

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch._subclasses.fake_tensor import FakeTensor

import polybridge
from tests.semantics.calls import to_tf, to_torch, with_gradient

MODES = ["eager", "graph"]
TINY = 1e-40  # a denormal float32


def run(mode, fn, x):
    """Return value and gradient of a wrapped torch function, eagerly or from one `tf.function`."""
    wrapped = to_tf(fn)

    def step(x):
        return with_gradient(wrapped, x)

    return (tf.function(step) if mode == "graph" else step)(x)


# Grad mode.


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_the_value_has_none(mode, context):
    with context():
        y, g = run(mode, lambda x: x**2, tf.constant([3.0]))
    assert y.numpy() == [9] and g is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
def test_the_function_sees_that_gradients_are_off(mode, context):
    seen = []
    with context():
        run(mode, lambda x: (seen.append(torch.is_grad_enabled()), x)[1], tf.constant([3.0]))
    assert set(seen) == {False}


@pytest.mark.parametrize("mode", MODES)
def test_the_function_sees_that_gradients_are_on(mode):
    seen = []
    run(mode, lambda x: (seen.append(torch.is_grad_enabled() and x.requires_grad), x * 2)[1], tf.constant([3.0]))
    assert set(seen) == {True}


def test_gradients_that_the_function_turns_off_itself_are_none():
    def fn(x):
        with torch.no_grad():
            return x**2

    assert run("eager", fn, tf.constant([3.0]))[1] is None
    assert run("graph", fn, tf.constant([3.0]))[1] is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_tensorflow_function_under_torch_without_gradients(context):
    x = torch.tensor([3.0], requires_grad=True)
    with context():
        y = to_torch(tf.square)(x)
    assert y.item() == 9 and not y.requires_grad


def test_a_result_of_inference_mode_stays_in_it():
    with torch.inference_mode():
        y = to_torch(tf.square)(torch.tensor([3.0]))
        assert torch.equal(y + 1, torch.tensor([10.0]))


def test_grad_mode_of_the_caller_is_restored():
    with torch.no_grad():
        run("graph", lambda x: x**2, tf.constant([3.0]))
        assert not torch.is_grad_enabled()
    run("graph", lambda x: x**2, tf.constant([3.0]))
    assert torch.is_grad_enabled()


# Autocast, default device and dtype, context variables.


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_on_in_the_function(mode):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, g = run(mode, lambda x: x @ x, tf.constant([[2.0]]))
    assert (y.dtype, g.dtype) == (tf.bfloat16, tf.float32)
    assert (float(y[0, 0]), float(g[0, 0])) == (4, 4)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_off_where_the_caller_has_it_off(mode):
    y, _ = run(mode, lambda x: x @ x, tf.constant([[2.0]]))
    assert y.dtype == tf.float32


def test_a_graph_keeps_the_autocast_of_its_trace():
    f = tf.function(to_tf(lambda x: x @ x))
    x = tf.constant([[2.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(x).dtype == tf.bfloat16
    assert f(x).dtype == tf.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_a_disabled_autocast_inside_an_enabled_one_stays_off(mode):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        y, _ = run(mode, lambda x: x @ x, tf.constant([[2.0]]))
    assert y.dtype == tf.float32


@pytest.mark.parametrize("mode", MODES)
def test_the_default_device_is_the_callers(mode):
    seen = []
    with torch.device("meta"):
        y, g = run(mode, lambda x: (seen.append(torch.empty(0).device.type), x * 2)[1], tf.constant([3.0]))
    assert set(seen) == {"meta"}
    assert (y.numpy(), g.numpy()) == ([6], [2])


@pytest.mark.parametrize("mode", MODES)
def test_the_default_dtype_is_the_processs(mode):
    torch.set_default_dtype(torch.float64)
    try:
        y, _ = run(mode, lambda x: x.sum() * torch.ones(2), tf.constant([3.0], tf.float64))
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == tf.float64


VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


@pytest.mark.parametrize("mode", MODES)
def test_context_variables_are_the_callers(mode):
    seen = []

    def fn(x):
        seen.append(VARIABLE.get())
        return x * 2

    contextvars.copy_context().run(lambda: (VARIABLE.set("set"), run(mode, fn, tf.constant([3.0]))))
    assert set(seen) == {"set"}


def test_context_variables_reach_the_backward_of_a_graph():
    seen = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, ct):
            seen.append(VARIABLE.get())
            return ct * 2

    contextvars.copy_context().run(lambda: (VARIABLE.set("set"), run("graph", Watching.apply, tf.constant([3.0]))))
    assert set(seen) == {"set"}


# Denormals.


@pytest.mark.parametrize("mode", MODES)
def test_denormals_survive_a_torch_function_forward_and_backward(mode):
    y, g = run(mode, lambda x: x * torch.tensor(TINY), tf.constant([1.0]))
    assert (y.numpy()[0], g.numpy()[0]) == (np.float32(TINY), np.float32(TINY))


@pytest.mark.parametrize("mode", MODES)
def test_denormals_survive_as_input(mode):
    y, _ = run(mode, lambda x: x * 1.0, tf.constant([TINY]))
    assert y.numpy()[0] == np.float32(TINY)


def test_denormals_survive_in_a_dataset():
    data = tf.data.Dataset.from_tensors([TINY]).map(to_tf(lambda x: x * 1.0), num_parallel_calls=2)
    assert next(iter(data)).numpy()[0] == np.float32(TINY)


def test_a_tensorflow_function_treats_denormals_as_tensorflow_does():
    native = (tf.constant([TINY]) * 1.0).numpy()[0]
    assert to_torch(lambda x: x * 1.0)(torch.tensor([TINY])).item() == native


def test_flushing_that_the_caller_asked_for_is_still_on_afterwards():
    torch.set_flush_denormal(True)
    try:
        run("eager", lambda x: x * 1.0, tf.constant([1.0]))
        assert (torch.tensor([TINY]) * 1.0).item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_the_callers_denormals_are_not_flushed_afterwards():
    run("graph", lambda x: x * 1.0, tf.constant([1.0]))
    to_torch(lambda x: x * 1.0)(torch.ones(1))
    assert (torch.tensor([TINY]) * 1.0).item() == np.float32(TINY)


# Exceptions.


class OwnError(Exception):
    """An exception that carries more than its text."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def fails(x):
    """Fail on values, not while shapes are found."""
    if isinstance(x, FakeTensor):
        return x * 2
    raise OwnError(42, "torch said no")


class FailsBackward(torch.autograd.Function):
    """Doubles, and fails on values in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, ct):
        if isinstance(ct, FakeTensor):
            return ct * 2
        raise OwnError(42, "torch said no")


@pytest.mark.parametrize("fn", [fails, FailsBackward.apply], ids=["forward", "backward"])
@pytest.mark.parametrize("call", ["first", "later"])
def test_an_exception_of_torch_keeps_its_type_in_eager_mode(fn, call):
    f = to_tf(fn)
    for _ in range(1 if call == "first" else 3):
        with pytest.raises(OwnError, match="torch said no") as caught:
            with_gradient(f, tf.constant([1.0]))
    assert caught.value.code == 42


@pytest.mark.parametrize("fn", [fails, FailsBackward.apply], ids=["forward", "backward"])
@pytest.mark.parametrize("call", ["first", "later"])
def test_an_exception_in_a_graph_is_told_and_remembered(fn, call):
    f = to_tf(fn)
    step = tf.function(lambda x: with_gradient(f, x))
    for _ in range(1 if call == "first" else 3):
        with pytest.raises(tf.errors.OpError, match=r"OwnError: torch said no"):
            step(tf.constant([1.0]))
    error = polybridge.last_error()
    assert (type(error), error.code) == (OwnError, 42)


def test_a_remembered_exception_has_the_users_traceback():
    with pytest.raises(tf.errors.OpError):
        tf.function(to_tf(fails))(tf.constant([1.0]))
    assert traceback.extract_tb(polybridge.last_error().__traceback__)[-1].name == "fails"


@pytest.mark.parametrize("kind", [ValueError, TypeError, StopIteration, MemoryError, KeyError, NotImplementedError])
def test_an_exception_that_tensorflow_maps_is_remembered_as_it_was(kind):
    def raises(x):
        if isinstance(x, FakeTensor):
            return x * 2
        raise kind("told")

    with pytest.raises(tf.errors.OpError, match=f"{kind.__name__}.*told"):
        tf.function(to_tf(raises))(tf.constant([1.0]))
    assert type(polybridge.last_error()) is kind


@pytest.mark.parametrize("kind", [StopIteration, KeyboardInterrupt, MemoryError])
def test_an_unusual_exception_keeps_its_type_in_eager_mode(kind):
    def raises(x):
        raise kind("told")

    with pytest.raises(kind, match="told"):
        with_gradient(to_tf(raises), tf.constant([1.0]))
    with pytest.raises(kind, match="told"):
        to_torch(raises)(torch.ones(1, requires_grad=True))


def raises_own(*_):
    """Raise from TensorFlow code."""
    raise OwnError(42, "tf said no")


@tf.custom_gradient
def tf_fails_backward(x):
    """Double, and fail in the backward."""
    return x * 2.0, raises_own


@pytest.mark.parametrize("fn", [raises_own, tf_fails_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("call", ["first", "later"])
def test_an_exception_of_tensorflow_keeps_its_type_in_torch(fn, call):
    f = to_torch(fn)
    for _ in range(1 if call == "first" else 3):
        with pytest.raises(OwnError, match="tf said no") as caught:
            f(torch.ones(1, requires_grad=True)).sum().backward()
    assert caught.value.code == 42


def test_an_error_of_a_tensorflow_operation_is_tensorflows():
    with pytest.raises(tf.errors.InvalidArgumentError):
        to_torch(lambda x: tf.reshape(x, [7]))(torch.ones(3))


def test_the_function_works_again_after_an_exception():
    broken = [True]

    def sometimes(x):
        if broken[0] and not isinstance(x, FakeTensor):
            raise OwnError(42, "once")
        return x * 2

    f = to_tf(sometimes)
    step = tf.function(lambda x: with_gradient(f, x))
    for attempt in (step, lambda x: with_gradient(f, x)):
        broken[0] = True
        with pytest.raises(Exception, match="once"):
            attempt(tf.constant([1.0]))
        broken[0] = False
        assert attempt(tf.constant([1.0]))[1].numpy() == [2]


def test_state_is_restored_after_an_exception():
    with pytest.raises(OwnError), torch.no_grad():
        to_tf(raises_own)(tf.constant([1.0]))
    with pytest.raises(OwnError):
        to_torch(raises_own)(torch.ones(1, requires_grad=True))
    assert torch.is_grad_enabled() and tf.executing_eagerly() and not tf.config.functions_run_eagerly()
