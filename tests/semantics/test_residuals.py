"""Asks that the backward belongs to the same forward, and that what it keeps lives exactly as long as needed."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch._subclasses.fake_tensor import FakeTensor

import polybridge
from polybridge.core import residuals
from tests.semantics.calls import to_tf, to_torch, with_gradient

N = 1000
ONES = tf.ones([N])


def is_one_mask(y, g):
    """Whether a gradient at ones is the mask (0 or 2) of its value, and about half of it is zero."""
    y, g = np.asarray(y).ravel(), np.asarray(g).ravel()
    return np.array_equal(y, g) and 0.3 < np.count_nonzero(y) / y.size < 0.7


DROPOUT = to_tf(lambda x: torch.nn.functional.dropout(x, 0.5))


# Masks: torch in TensorFlow.


def test_mask_in_eager_mode():
    assert is_one_mask(*with_gradient(DROPOUT, ONES))


def test_mask_inside_a_tf_function():
    assert is_one_mask(*tf.function(lambda x: with_gradient(DROPOUT, x))(ONES))


def test_mask_around_a_tf_function():
    assert is_one_mask(*with_gradient(tf.function(DROPOUT), ONES))


def test_mask_is_drawn_anew_at_every_call_of_a_graph():
    step = tf.function(lambda x: with_gradient(DROPOUT, x))
    first, second = step(ONES), step(ONES)
    assert is_one_mask(*first) and is_one_mask(*second)
    assert not np.array_equal(first[0], second[0])


def test_masks_in_a_while_loop():
    """Three masks multiply; the gradient at ones is the product of all of them."""

    @tf.function
    def step(x):
        return with_gradient(
            lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, DROPOUT(y)), [0, x])[1], x
        )

    y, g = step(ONES)
    np.testing.assert_array_equal(y, g)
    assert 0.03 < np.count_nonzero(y) / N < 0.25


@pytest.mark.parametrize("parallel", [1, 4])
def test_masks_in_map_fn(parallel):
    step = tf.function(lambda x: with_gradient(lambda x: tf.map_fn(DROPOUT, x, parallel_iterations=parallel), x))
    y, g = step(tf.ones([5, N]))
    assert is_one_mask(y, g)
    assert not np.array_equal(y[0], y[1])


def test_mask_in_scan_and_cond():
    def body(total, x):
        return total + tf.cond(tf.reduce_sum(x) > 0, lambda: DROPOUT(x), lambda: x)

    step = tf.function(lambda x: with_gradient(lambda x: tf.scan(body, x, initializer=tf.zeros([N]))[-1], x))
    y, g = step(tf.ones([3, N]))
    np.testing.assert_array_equal(y, tf.reduce_sum(g, 0))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_mask_at_second_order(mode):
    """f(x) = mask * x**2: value, half the gradient and half the second derivative are the same mask."""
    f = to_tf(lambda x: torch.nn.functional.dropout(x, 0.5) * x)

    def both(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            y, g = with_gradient(f, x)
        return y, g, outer.gradient(g, x)

    y, g, h = (tf.function(both) if mode == "graph" else both)(ONES)
    assert is_one_mask(y, g / 2) and is_one_mask(y, h / 2)


# Masks: TensorFlow in torch.

LAYER = keras.layers.Dropout(0.5)
TF_DROPOUTS = {
    "tf.nn": lambda x: tf.nn.dropout(x, 0.5),
    "keras": lambda x: LAYER(x, training=True),
    "tf.function": tf.function(lambda x: tf.nn.dropout(x, 0.5)),
    "stateless seed by run": lambda x: x * tf.cast(tf.random.uniform([N]) < 0.5, x.dtype) * 2,
}


@pytest.mark.parametrize("name", TF_DROPOUTS)
def test_mask_of_a_tensorflow_function_in_torch(name):
    x = torch.ones(N, requires_grad=True)
    y = to_torch(TF_DROPOUTS[name])(x)
    y.sum().backward()
    assert is_one_mask(y.detach(), x.grad)


@pytest.mark.parametrize("name", TF_DROPOUTS)
def test_mask_of_a_tensorflow_function_at_second_order(name):
    x = torch.ones(N, requires_grad=True)
    y = to_torch(lambda x: TF_DROPOUTS[name](x) * x)(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert is_one_mask(y.detach(), g.detach() / 2) and is_one_mask(y.detach(), h / 2)


def test_mask_survives_a_second_backward():
    x = torch.ones(N, requires_grad=True)
    y = to_torch(TF_DROPOUTS["tf.nn"])(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and is_one_mask(y.detach(), first)


# State of the source.


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_batch_norm_of_torch_counts_one_batch_per_step(mode):
    norm = torch.nn.BatchNorm1d(3, affine=False)
    f = to_tf(lambda x: norm(x))

    def step(x):
        return with_gradient(f, x)

    (tf.function(step) if mode == "graph" else step)(tf.random.stateless_normal([8, 3], [1, 2]))
    assert norm.num_batches_tracked.item() == 1


def test_a_batch_norm_of_torch_is_untouched_by_tracing():
    norm = torch.nn.BatchNorm1d(3, affine=False)
    tf.function(to_tf(lambda x: norm(x))).get_concrete_function(tf.TensorSpec([8, 3]))
    assert norm.num_batches_tracked.item() == 0
    assert type(norm.running_mean) is torch.Tensor and norm.running_mean.tolist() == [0, 0, 0]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_variable_of_tensorflow_counts_one_run_per_step(steps):
    counter = tf.Variable(0, trainable=False)

    def counted(x):
        counter.assign_add(1)
        return x**3

    f = to_torch(counted)
    for _ in range(steps):
        x = torch.tensor([2.0], requires_grad=True)
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        g.backward()
    assert counter.numpy() == steps


def test_a_keras_batch_norm_moves_its_mean_once_per_step():
    norm = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
    norm.build((None, 1))
    x = torch.tensor([[2.0], [6.0]], requires_grad=True)
    to_torch(lambda x: norm(x, training=True))(x).sum().backward()
    np.testing.assert_allclose(norm.moving_mean, [2.0])


@pytest.mark.parametrize("dst", ["tf", "torch"])
def test_the_function_runs_once_in_eager_mode(dst):
    runs = []

    def fn(x):
        runs.append(1)
        return x * x

    if dst == "tf":
        with_gradient(to_tf(fn), tf.constant([1.0]))
    else:
        to_torch(fn)(torch.ones(1, requires_grad=True)).backward()
    assert len(runs) == 1


# Lifetimes.


class Kept:
    """A torch function that leaves a weak reference to what its graph saved at every run."""

    def __init__(self):
        self.saved = []
        self.wrapped = to_tf(self)

    def __call__(self, x):
        y = x * 2
        if not isinstance(y, FakeTensor):  # of the trace, which lives as long as the graph
            self.saved.append(weakref.ref(y))
        return y * y  # saves y

    def alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self.saved)


def entries():
    """Return how many residuals graphs hold."""
    gc.collect()
    return len(residuals._residuals)


def test_a_forward_of_a_graph_leaves_no_residual():
    f, before = Kept(), entries()
    graph = tf.function(f.wrapped)
    for _ in range(10):
        graph(ONES)
    assert entries() == before and f.alive() == 0


def test_a_step_of_a_graph_leaves_no_residual():
    f, before = Kept(), entries()
    step = tf.function(lambda x: with_gradient(f.wrapped, x))
    for _ in range(10):
        step(ONES)
    assert entries() == before and f.alive() == 0


def test_a_graph_whose_gradient_is_pruned_leaves_no_residual():
    f, before = Kept(), entries()
    step = tf.function(lambda x: with_gradient(f.wrapped, x)[0])
    for _ in range(10):
        step(ONES)
    assert entries() == before and f.alive() == 0


def test_a_tape_around_a_graph_keeps_the_residual_until_it_dies():
    f, before = Kept(), entries()
    graph = tf.function(f.wrapped)
    x = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = graph(x)
    assert entries() == before + 1
    np.testing.assert_array_equal(tape.gradient(y, x), [8, 8, 8])
    del tape, y
    assert entries() == before and f.alive() == 0


def test_a_loop_leaves_no_residual():
    f, before = Kept(), entries()

    def looped(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, f.wrapped(y)), [0, x])[1]

    tf.function(lambda x: with_gradient(looped, x))(ONES)
    assert len(f.saved) == 4
    assert entries() == before and f.alive() == 0


class Fails(torch.autograd.Function):
    """Doubles, and cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, ct):
        raise ValueError("no")


def test_failing_backwards_leave_no_more_than_the_residual_in_the_traceback_of_the_last_error():
    before = entries()
    f = to_tf(Fails.apply, output_specs=polybridge.TensorSpec((N,), "float32"))
    step = tf.function(lambda x: with_gradient(f, x))
    for _ in range(3):
        with pytest.raises(tf.errors.OpError, match="no"):
            step(ONES)
    assert entries() <= before + 1


def test_an_eager_tape_frees_the_residual_with_itself():
    f = Kept()
    x = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f.wrapped(x)
    assert f.alive() == 1
    tape.gradient(y, x)
    del tape, y
    assert f.alive() == 0


def test_an_eager_call_without_a_tape_keeps_nothing():
    f = Kept()
    for _ in range(3):
        f.wrapped(ONES)
    assert f.alive() == 0


class KeptByTensorFlow:
    """A TensorFlow function that leaves a weak reference to an intermediate tensor at every run."""

    def __init__(self):
        self.saved = []
        self.wrapped = to_torch(self)

    def __call__(self, x):
        y = x * 2.0
        self.saved.append(weakref.ref(y))
        return y * y

    alive = Kept.alive


def test_backward_in_torch_frees_the_residual():
    f = KeptByTensorFlow()
    x = torch.ones(3, requires_grad=True)
    y = f.wrapped(x)
    assert f.alive() == 1
    y.sum().backward()
    assert f.alive() == 0


def test_backward_in_torch_keeps_the_residual_if_asked():
    f = KeptByTensorFlow()
    x = torch.ones(3, requires_grad=True)
    y = f.wrapped(x)
    y.sum().backward(retain_graph=True)
    assert f.alive() == 1
    del y
    assert f.alive() == 0


def test_dropping_the_result_in_torch_frees_the_residual():
    f = KeptByTensorFlow()
    y = f.wrapped(torch.ones(3, requires_grad=True))
    del y
    assert f.alive() == 0


def test_a_second_backward_in_torch_is_torchs_own_error():
    y = to_torch(lambda x: x * x)(torch.ones(3, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_torch_keeps_nothing(context):
    f = KeptByTensorFlow()
    with context():
        y = f.wrapped(torch.ones(3, requires_grad=True))
    assert f.alive() == 0 and not y.requires_grad


def test_results_of_torch_are_freed_by_reference_counting_alone():
    """No cycle through ctx: the memory of a step goes when its names go, as natively."""
    f = KeptByTensorFlow()
    x = torch.ones(3, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        y = f.wrapped(x)
        residual, result = f.saved[-1], weakref.ref(y)
        y.sum().backward()
        del y
        assert (residual(), result()) == (None, None)
    finally:
        gc.enable()


def test_results_of_tensorflow_are_freed_by_reference_counting_alone():
    f = Kept()
    gc.collect()
    gc.disable()
    try:
        y, g = with_gradient(f.wrapped, tf.ones([3]))
        del y, g
        assert f.saved[-1]() is None
    finally:
        gc.enable()


def test_a_wrapped_function_that_is_dropped_is_freed():
    f = Kept()
    with_gradient(f.wrapped, ONES)
    dropped = weakref.ref(f)
    del f
    gc.collect()
    assert dropped() is None
