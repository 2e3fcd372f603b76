"""Asks what is left behind when a call is interrupted, and what becomes of exceptions that mean something to Python."""

import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch._subclasses.fake_tensor import FakeTensor

import polybridge
from polybridge.backends.numpy import recording
from polybridge.backends.tensorflow import functional as of_tensorflow
from polybridge.backends.torch import functional as of_torch
from tests.semantics.calls import to_tf, with_gradient
from tests.semantics.interrupts import interrupted
from tests.semantics.processes import run

# Interrupts.


def test_a_torch_module_has_its_own_weights_and_mode_after_an_interrupt():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    layer = polybridge.wrap(net, dst="keras")
    x = tf.ones([2, 3])
    expected = layer(x).numpy()
    own = [id(p) for p in [*net.parameters(), *net.buffers()]]
    codes = {of_torch._put.__code__, of_torch._found.__code__, of_torch._set_mode.__code__}
    at = 0
    while interrupted(lambda: layer(x), at, codes):
        assert [id(p) for p in [*net.parameters(), *net.buffers()]] == own
        assert all(inner.training for inner in net.modules())
        np.testing.assert_array_equal(layer(x), expected)
        at += 1
    assert at > 30


class Counted(tf.Module):
    """Counts its calls, and says so in its result."""

    def __init__(self):
        super().__init__()
        self.weight, self.count = tf.Variable([1.0, 2.0]), tf.Variable(0.0, trainable=False)

    def __call__(self, x):
        """Return the product and the count."""
        return self.weight * x, self.count.assign_add(1.0)


def test_a_tensorflow_module_has_its_own_values_after_an_interrupt():
    source = Counted()
    module = polybridge.wrap(source, dst="torch")
    with torch.no_grad():
        module.weight.mul_(10)
    functional = of_tensorflow.TensorFlowFunctional
    codes = {functional._assign.__code__, of_tensorflow._take.__code__, of_tensorflow._release.__code__}
    at = 0
    while interrupted(lambda: module(torch.ones(2)), at, codes):
        assert source.weight.numpy().tolist() == [1.0, 2.0] and source.count.numpy() == 0
        assert not of_tensorflow._in_use
        assert module(torch.ones(2))[0].tolist() == [10.0, 20.0]
        at += 1
    assert at > 20
    with ThreadPoolExecutor() as others:  # nothing is locked
        assert others.submit(lambda: module(torch.ones(2))[0].tolist()).result(timeout=10) == [10.0, 20.0]


def test_numpy_waits_for_no_derivative_after_an_interrupt():
    f = polybridge.wrap(torch.square, src="torch", dst="numpy")
    codes = {recording.waiting_for.__wrapped__.__code__}
    assert interrupted(lambda: f.vjp(np.ones(2)), 3, codes)  # as soon as it waits
    assert recording.waiting.get() is None


class Cubed(torch.autograd.Function):
    """The cube, with a signal in the midst of it."""

    where = None

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        if Cubed.where == "forward":
            signal.raise_signal(signal.SIGINT)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        if Cubed.where == "backward":
            signal.raise_signal(signal.SIGINT)
        return 3 * x**2 * ct


def in_tensorflow(f, x):
    """Return value and gradient."""
    value, gradient = with_gradient(f, tf.constant(x))
    return value.numpy(), gradient.numpy()


def in_jax(f, x):
    """Return value and gradient."""
    value, pull = jax.vjp(f, jnp.asarray(x))
    return value, pull(jnp.ones_like(value))[0]


def in_numpy(f, x):
    """Return value and gradient."""
    value, pull = f.vjp(x)
    return value, pull(np.ones_like(value))[0]


@pytest.fixture
def heard():
    """Python's own handler, also in a process that was started with signals ignored, as a shell does behind `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("dst", "evaluate"), [("tf", in_tensorflow), ("jax", in_jax), ("numpy", in_numpy)])
def test_a_signal_reaches_the_caller_and_leaves_the_function_as_it_was(dst, evaluate, where, monkeypatch):
    f = polybridge.wrap(Cubed.apply, src="torch", dst=dst)
    x = np.array([1.0, 2.0], np.float32)
    evaluate(f, x)
    with monkeypatch.context() as armed:
        armed.setattr(Cubed, "where", where)
        with pytest.raises(KeyboardInterrupt):
            evaluate(f, x)
    value, gradient = evaluate(f, x)
    np.testing.assert_allclose(value, x**3)
    np.testing.assert_allclose(gradient, 3 * x**2)


def test_a_handler_of_signals_may_call_what_it_has_interrupted():
    text = run("""
        import signal, sys
        import jax, jax.numpy as jnp, torch
        import polybridge
        from polybridge.core import residuals

        gradient = jax.jit(jax.grad(polybridge.wrap(lambda x: (x**3).sum(), src="torch", dst="jax")))
        gradient(jnp.ones(2))
        found = []

        def handler(*_):
            found.append(gradient(jnp.array([1.0, 2.0])).tolist())

        def trace(frame, event, _):
            if frame.f_code is residuals._Table.add.__code__ and not found:
                found.append("here")
                signal.raise_signal(signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handler)
        sys.settrace(trace)
        value = gradient(jnp.array([2.0, 3.0])).tolist()
        sys.settrace(None)
        print(found, value)
    """)
    assert text == "['here', [3.0, 12.0]] [12.0, 27.0]\n"


def test_a_finalizer_may_call_what_has_the_switch_of_tensorflow():
    text = run("""
        import sys
        import tensorflow as tf
        from polybridge.backends.tensorflow import callbacks

        def turn():
            with callbacks.functions_run_eagerly():
                assert tf.config.functions_run_eagerly()

        def interrupted(at):
            seen = 0

            def trace(frame, event, _):
                nonlocal seen
                if frame.f_code is not callbacks.functions_run_eagerly.__wrapped__.__code__:
                    return None
                seen += event == "line"
                if seen == at:
                    seen += 1
                    sys.settrace(None)
                    turn()
                    turn()
                    sys.settrace(trace)
                return trace

            sys.settrace(trace)
            turn()
            sys.settrace(None)
            return seen > at

        for before in (False, True):
            tf.config.run_functions_eagerly(before)
            at = 1
            while interrupted(at):
                assert tf.config.functions_run_eagerly() == before, at
                assert not callbacks._eager_threads
                at += 1
            assert at > 10
        print("ends")
    """)
    assert text == "ends\n"


def test_a_handler_of_signals_may_call_with_another_dataclass():
    text = run("""
        import dataclasses, signal
        import optree, torch
        import polybridge

        f = polybridge.wrap(lambda pair: pair.x * 2, src="torch", dst="numpy")
        register, found = optree.register_pytree_node, []

        def registering(cls, *args, **kwargs):
            optree.register_pytree_node = register
            signal.raise_signal(signal.SIGUSR1)
            return register(cls, *args, **kwargs)

        @dataclasses.dataclass
        class One:
            x: object

        @dataclasses.dataclass
        class Other:
            x: object

        def handler(*_):
            found.append([f(Other(torch.ones(1).numpy())).tolist(), f(One(torch.ones(1).numpy())).tolist()])

        signal.signal(signal.SIGUSR1, handler)
        optree.register_pytree_node = registering
        print(f(One(torch.ones(2).numpy())).tolist(), found)
    """)
    assert text == "[2.0, 2.0] [[[2.0], [2.0]]]\n"


# Exceptions that mean something to who calls.


def stops(x):
    """Raise StopIteration, where there are values."""
    if not isinstance(x, FakeTensor):
        raise StopIteration("told")
    return x * 2


class Stops(torch.autograd.Function):
    """Doubles, and raises StopIteration in its backward for the second cotangent that it gets."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, ct):
        if isinstance(ct, FakeTensor):
            return ct * 2
        Stops.calls += 1
        if Stops.calls % 2 == 0:
            raise StopIteration("told")
        return ct * 2


@pytest.mark.parametrize("fn", [stops, Stops.apply], ids=["forward", "backward"])
def test_stop_iteration_does_not_end_the_training_of_keras(fn):
    f = to_tf(fn)

    class Doubled(keras.layers.Layer):
        def build(self, _):
            self.weight = self.add_weight(shape=())

        def call(self, x):
            return f(x * self.weight)

    model = keras.Sequential([Doubled()])
    model.compile("sgd", "mse", run_eagerly=False, jit_compile=False)
    x = np.ones((8, 1), np.float32)
    with pytest.raises(tf.errors.UnknownError, match="raised StopIteration: told"):
        model.fit(x, x, batch_size=2, verbose=0)
    assert type(polybridge.last_error()) is StopIteration


def test_stop_iteration_leaves_no_row_out_of_a_batch_of_cotangents_in_jax():
    Stops.calls = 0
    f = polybridge.wrap(Stops.apply, src="torch", dst="jax")
    _, pull = jax.vjp(f, jnp.ones(3))
    with pytest.raises(StopIteration, match="told"):
        jax.vmap(pull)(jnp.eye(3))
