"""Modules that are run again in the backward: the same gradients, the same masks, and less kept in between."""

import gc
import weakref

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils.checkpoint import checkpoint

import polybridge
from polybridge import RandomnessError

DEPTH, SIZE = 4, 5
X = np.random.default_rng(0).normal(size=(3, SIZE)).astype("float32")
reentrancy = pytest.mark.parametrize("reentrant", [False, True])


class KerasBlock(keras.layers.Layer):
    """Keeps a weak reference to what its backward needs."""

    run_eagerly = True

    saved: list = []  # noqa: RUF012  (of all blocks)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(SIZE, SIZE), initializer="glorot_uniform")

    def call(self, x):
        y = tf.tanh(x @ self.kernel)
        if tf.executing_eagerly():
            self.saved.append(weakref.ref(y))
        return y * y


class TorchBlock(torch.nn.Module):
    """Likewise."""

    saved: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.kernel = torch.nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x):
        y = _Saved.apply(torch.tanh(x @ self.kernel), self.saved)
        return y * y


class _Saved(torch.autograd.Function):
    """The identity; what it saves lives as long as its node in the graph."""

    @staticmethod
    def forward(x, saved):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.kept = np.zeros(output.numel())
        if type(output) is torch.Tensor:
            inputs[1].append(weakref.ref(ctx.kept))

    @staticmethod
    def backward(ctx, ct):
        return ct, None


def alive(block) -> int:
    gc.collect()
    return sum(ref() is not None for ref in block.saved)


@pytest.fixture(autouse=True)
def _forget():
    for block in (KerasBlock, TorchBlock):
        block.saved.clear()


def keras_blocks():
    keras.utils.set_random_seed(0)
    blocks = [KerasBlock() for _ in range(DEPTH)]
    for block in blocks:
        block.build((None, SIZE))
    return blocks


def torch_blocks():
    torch.manual_seed(0)
    return [TorchBlock() for _ in range(DEPTH)]


def by_keras():
    blocks = keras_blocks()
    with tf.GradientTape() as tape:
        y = tf.constant(X)
        for block in blocks:
            y = block(y)
    return [g.numpy() for g in tape.gradient(y, [block.kernel.value for block in blocks])]


def by_torch():
    blocks = torch_blocks()
    y = torch.from_numpy(X)
    for block in blocks:
        y = block(y)
    return [g.numpy() for g in torch.autograd.grad(y.sum(), [block.kernel for block in blocks])]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# Of torch.


@reentrancy
def test_torch_checkpoints_give_the_gradients_of_keras_and_keep_one_blocks_memory_at_most(reentrant):
    expected = by_keras()
    blocks = [polybridge.wrap(block, dst="torch") for block in keras_blocks()]
    for block in blocks:
        block(torch.from_numpy(X))  # what a first call shows is kept longer
    KerasBlock.saved.clear()
    y = torch.from_numpy(X).requires_grad_()
    for block in blocks:
        y = checkpoint(block, y, use_reentrant=reentrant)
    assert alive(KerasBlock) == 0
    y.sum().backward()
    close([next(block.parameters()).grad for block in blocks], expected)
    assert len(KerasBlock.saved) == 2 * DEPTH


def test_without_checkpoints_torch_keeps_every_blocks_memory():
    blocks = [polybridge.wrap(block, dst="torch") for block in keras_blocks()]
    y = torch.from_numpy(X)
    for block in blocks:
        y = block(y)
    assert alive(KerasBlock) == DEPTH


@reentrancy
def test_a_torch_checkpoint_draws_the_mask_of_the_forward(reentrant):
    keras.utils.set_random_seed(0)
    dropout = polybridge.wrap(keras.Sequential([keras.Input([1000]), keras.layers.Dropout(0.5)]), dst="torch")
    x = torch.rand(2, 1000, requires_grad=True)
    y = checkpoint(dropout, x, use_reentrant=reentrant)
    y.sum().backward()
    assert 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(x.grad, torch.where(y == 0, 0.0, 2.0))


# Of TensorFlow.


def recomputed(blocks, x):
    """Return a value and gradients through `tf.recompute_grad`, and what is kept between forward and backward."""
    with tf.GradientTape() as tape:
        y = tf.convert_to_tensor(x)
        for block in blocks:
            y = tf.recompute_grad(block)(y)
    kept = alive(TorchBlock)
    return tape.gradient(y, [block.params["kernel"] for block in blocks]), kept


def test_tf_recompute_grad_gives_the_gradients_of_torch_and_keeps_nothing():
    expected = by_torch()
    blocks = [polybridge.wrap(block, dst="tf") for block in torch_blocks()]
    recomputed(blocks, X)  # what a first call shows is kept longer
    TorchBlock.saved.clear()
    found, kept = recomputed(blocks, X)
    close(found, expected)
    assert kept == 0


def test_without_recompute_grad_tf_keeps_every_blocks_memory():
    blocks = [polybridge.wrap(block, dst="tf") for block in torch_blocks()]
    with tf.GradientTape():
        y = tf.constant(X)
        for block in blocks:
            y = block(y)
        assert alive(TorchBlock) == DEPTH


def test_tf_recompute_grad_in_a_graph():
    expected = by_torch()
    blocks = [polybridge.wrap(block, dst="tf") for block in torch_blocks()]
    close(tf.function(lambda x: recomputed(blocks, x)[0])(tf.constant(X)), expected)


@pytest.mark.parametrize("dst", ["tf", "keras"])
def test_tf_recompute_grad_would_draw_another_mask(dst):
    dropout = polybridge.wrap(torch.nn.Dropout(0.5), dst=dst)
    again = tf.recompute_grad(lambda x, training: dropout(x, training=training))
    with pytest.raises(RandomnessError, match="`Dropout` draws random numbers"):
        again(tf.constant(X), True)
    np.testing.assert_array_equal(again(tf.constant(X), False), X)


# Of JAX.


def in_jax(blocks, transform):
    """Return the gradients of all kernels in one step, and how many residuals it kept at once."""
    applies = [transform(lambda params, x, block=block: block.apply(params, {}, x)[0]) for block in blocks]

    def loss(params, x):
        for apply, own in zip(applies, params, strict=True):
            x = apply(own, x)
        return x.sum()

    return jax.grad(loss)([block.params for block in blocks], X)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_jax_checkpoint_gives_the_gradients_of_torch(compiled):
    blocks = [polybridge.wrap(block, dst="jax") for block in torch_blocks()]
    step = lambda: in_jax(blocks, jax.checkpoint)  # noqa: E731
    found = jax.jit(step)() if compiled else step()
    close([g["kernel"] for g in found], by_torch())


def test_jax_checkpoint_keeps_nothing_between_forward_and_backward():
    blocks = [polybridge.wrap(block, dst="jax") for block in torch_blocks()]
    kept = {}
    for name, transform in {"checkpoint": jax.checkpoint, "plain": lambda f: f}.items():
        applies = [transform(lambda params, x, block=block: block.apply(params, {}, x)[0]) for block in blocks]

        def forward(params, x, applies=applies):
            for apply, own in zip(applies, params, strict=True):
                x = apply(own, x)
            return x

        jax.vjp(forward, [block.params for block in blocks], X)  # what a first call shows is kept longer
        gc.collect()
        TorchBlock.saved.clear()
        _, pull = jax.vjp(forward, [block.params for block in blocks], X)
        kept[name] = alive(TorchBlock)
        del pull
    assert kept == {"checkpoint": 0, "plain": DEPTH}


def test_a_jax_checkpoint_draws_the_mask_of_the_forward():
    dropout = polybridge.wrap(torch.nn.Dropout(0.5), dst="jax")

    @jax.jit
    def step(x, key):
        apply = jax.checkpoint(lambda x: dropout.apply({}, {}, x, rng=key, training=True)[0])
        y, pull = jax.vjp(apply, x)
        return y, pull(jax.numpy.ones_like(y))[0]

    y, gradient = step(np.random.default_rng(0).uniform(1, 2, 1000).astype("float32"), jax.random.key(0))
    assert 0 < (y == 0).sum() < y.size
    np.testing.assert_array_equal(gradient, np.where(y == 0, 0.0, 2.0))


# Micro-batches: the gradients of the halves of a batch add up to that of the whole.

HALVES = X[:1], X[1:]


def test_gradients_accumulate_in_torch():
    blocks = [polybridge.wrap(block, dst="torch") for block in keras_blocks()]
    for half in HALVES:
        torch.nn.Sequential(*blocks)(torch.from_numpy(half)).sum().backward()
    close([next(block.parameters()).grad for block in blocks], by_keras())


def test_gradients_accumulate_in_jax():
    blocks = [polybridge.wrap(block, dst="jax") for block in torch_blocks()]

    def loss(params, x):
        for block, own in zip(blocks, params, strict=True):
            x = block.apply(own, {}, x)[0]
        return x.sum()

    gradient = jax.jit(jax.grad(loss))
    found = [gradient([block.params for block in blocks], half) for half in HALVES]
    close([a["kernel"] + b["kernel"] for a, b in zip(*found, strict=True)], by_torch())


def test_gradients_accumulate_in_keras():
    """Two batches of one size, of which Keras takes the mean; `fit` updates once."""
    x = np.concatenate([X, 2 * X])
    y = np.zeros((6, 1), "float32")
    module = torch.nn.Linear(SIZE, 1)
    kernel = module.weight.detach().clone().requires_grad_()
    loss = (torch.from_numpy(x) @ kernel.T + module.bias.detach()).square().mean()
    loss.backward()
    model = keras.Sequential([keras.Input([SIZE]), polybridge.wrap(module, dst="keras")])
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    found = model.layers[0].sync_to_source().weight.detach()
    torch.testing.assert_close(found, (kernel - 0.1 * kernel.grad).detach(), rtol=1e-5, atol=1e-6)
