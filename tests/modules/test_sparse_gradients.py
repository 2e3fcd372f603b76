"""Gradients of looked-up rows arrive as rows, where the destination takes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.observe import count_crossings

ROWS, WIDTH = 50, 3
INDICES = np.array([[1, 4, 1], [7, 0, 4]])
TOUCHED = [0, 1, 4, 7]


@pytest.fixture(params=["eager", "tf.function"])
def staged(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return (lambda f: f) if request.param == "eager" else tf.function


def embedding(sparse: bool = True) -> torch.nn.Embedding:
    torch.manual_seed(0)
    return torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)


def native(module: torch.nn.Module, indices: Any = INDICES) -> Any:
    """Return the gradient of the sum of cubes, as a dense array."""
    (gradient,) = torch.autograd.grad(module(torch.tensor(indices)).pow(3).sum(), list(module.parameters()))
    return gradient.to_dense().numpy()


def in_tensorflow(layer: Any, indices: Any = INDICES) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.convert_to_tensor(indices)) ** 3)
    (gradient,) = tape.gradient(loss, layer.trainable_variables)
    return gradient


@pytest.mark.parametrize("dst", ["keras", "tf"])
def test_rows_of_torch_are_indexed_slices(dst: str, staged: Callable[[Any], Any]) -> None:
    module = embedding()
    layer = polybridge.wrap(module, dst=dst)
    gradient = staged(lambda: in_tensorflow(layer))()
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == TOUCHED  # each once: Keras's optimisers square rows one by one
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), native(module), rtol=1e-12)


def test_a_dense_gradient_of_torch_stays_dense(staged: Callable[[Any], Any]) -> None:
    layer = polybridge.wrap(embedding(sparse=False), dst="tf")
    assert tf.is_tensor(staged(lambda: in_tensorflow(layer))())


def test_rows_may_be_refused(staged: Callable[[Any], Any]) -> None:
    module = embedding()
    layer = polybridge.wrap(module, dst="tf", sparse=False)
    gradient = staged(lambda: in_tensorflow(layer))()
    assert tf.is_tensor(gradient)
    np.testing.assert_allclose(gradient, native(module), rtol=1e-12)


def test_a_batch_of_another_size_has_rows_of_its_own() -> None:
    module = embedding()
    layer = polybridge.wrap(module, dst="tf")
    step = tf.function(lambda x: in_tensorflow(layer, x), input_signature=[tf.TensorSpec([None], tf.int64)])
    for size in (1, 5, 0):
        indices = np.arange(size) + 3
        gradient = step(tf.constant(indices))
        assert gradient.values.shape == (size, WIDTH)
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), native(module, indices), rtol=1e-12)


def test_second_derivatives_go_through_rows(staged: Callable[[Any], Any]) -> None:
    """The Hessian of the sum of cubes, applied to the gradient, with rows that are there twice."""
    module = embedding()
    layer = polybridge.wrap(module, dst="tf")
    (weight,) = layer.trainable_variables

    def product() -> Any:
        with tf.GradientTape() as outer:
            gradient = tf.convert_to_tensor(in_tensorflow(layer))
            loss = tf.reduce_sum(gradient**2)
        return tf.convert_to_tensor(outer.gradient(loss, weight))

    dense = embedding(sparse=False)
    (gradient,) = torch.autograd.grad(
        dense(torch.tensor(INDICES)).pow(3).sum(), list(dense.parameters()), create_graph=True
    )
    (expected,) = torch.autograd.grad(gradient.pow(2).sum(), list(dense.parameters()))
    np.testing.assert_allclose(staged(product)(), expected, rtol=1e-12)


def test_a_jacobian_goes_through_rows() -> None:
    module = embedding()
    layer = polybridge.wrap(module, dst="tf")
    for step in (lambda f: f, tf.function):

        @step
        def jacobian() -> Any:
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(layer(tf.constant(INDICES)) ** 3, axis=1)
            return tape.jacobian(y, layer.trainable_variables[0])

        found = tf.convert_to_tensor(jacobian())
        weight = module.weight.detach()
        expected = torch.func.jacrev(lambda w: w[torch.tensor(INDICES)].pow(3).sum(1))(weight)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_sparse_optimiser_of_keras_trains_through_the_seam() -> None:
    """Adagrad leaves alone the rows that nobody looked up; its twin is torch's."""
    module = embedding().float()
    twin = copy.deepcopy(module)
    layer = polybridge.wrap(module, dst="keras")
    optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-10)
    native_optimizer = torch.optim.Adagrad(twin.parameters(), 0.1, eps=1e-10)
    before = module.weight.detach().numpy().copy()

    @tf.function
    def step() -> None:
        optimizer.apply([in_tensorflow(layer)], layer.trainable_variables)

    for _ in range(3):
        step()
        native_optimizer.zero_grad()
        twin(torch.tensor(INDICES)).pow(3).sum().backward()
        native_optimizer.step()
    layer.sync_to_source()
    untouched = np.setdiff1d(np.arange(ROWS), TOUCHED)
    np.testing.assert_array_equal(module.weight.detach().numpy()[untouched], before[untouched])
    np.testing.assert_allclose(module.weight.detach(), twin.weight.detach(), rtol=1e-5)


def keras_embedding() -> Any:
    keras.utils.set_random_seed(0)
    layer = keras.layers.Embedding(ROWS, WIDTH)
    layer.build((None, 3))
    return layer


def test_rows_of_keras_are_a_sparse_tensor_where_they_are_asked_for() -> None:
    layer = keras_embedding()
    module = polybridge.wrap(layer, dst="torch", sparse=True)
    module(torch.tensor(INDICES)).pow(3).sum().backward()
    (weight,) = module.parameters()
    assert weight.grad is not None and weight.grad.layout is torch.sparse_coo
    assert weight.grad.coalesce().indices()[0].tolist() == TOUCHED
    expected = tf.convert_to_tensor(in_tensorflow(layer))
    np.testing.assert_allclose(weight.grad.to_dense(), expected, rtol=1e-6)


def test_rows_of_keras_are_dense_where_they_are_not() -> None:
    """Most of torch's optimisers, and `clip_grad_norm_`, refuse sparse gradients."""
    layer = keras_embedding()
    module = polybridge.wrap(layer, dst="torch")
    module(torch.tensor(INDICES)).pow(3).sum().backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e6)
    (weight,) = module.parameters()
    assert weight.grad is not None
    np.testing.assert_allclose(weight.grad, tf.convert_to_tensor(in_tensorflow(layer)), rtol=1e-6)


def test_gradients_accumulate_as_rows() -> None:
    module = polybridge.wrap(keras_embedding(), dst="torch", sparse=True)
    (weight,) = module.parameters()
    module(torch.tensor(INDICES)).sum().backward()
    assert weight.grad is not None
    once = weight.grad.to_dense()
    module(torch.tensor(INDICES)).sum().backward()
    assert weight.grad.layout is torch.sparse_coo
    torch.testing.assert_close(weight.grad.to_dense(), 2 * once)


def test_sparse_adam_trains_through_the_seam() -> None:
    layer = keras_embedding()
    before = np.array(layer.embeddings)
    module = polybridge.wrap(layer, dst="torch", sparse=True)
    twin = torch.nn.Embedding.from_pretrained(torch.tensor(before), freeze=False, sparse=True)
    optimizers = [torch.optim.SparseAdam(m.parameters(), 0.1) for m in (module, twin)]
    for _ in range(3):
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(torch.tensor(INDICES)).pow(3).sum().backward()
            optimizer.step()
    module.sync_to_source()
    untouched = np.setdiff1d(np.arange(ROWS), TOUCHED)
    np.testing.assert_array_equal(np.array(layer.embeddings)[untouched], before[untouched])
    np.testing.assert_allclose(layer.embeddings, twin.weight.detach(), rtol=1e-5)


def test_a_function_that_looks_up_has_rows_too() -> None:
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    lookup = polybridge.wrap(tf.gather, src="tf", dst="torch", sparse=True)
    lookup(table, torch.tensor([3, 3])).sum().backward()
    assert table.grad is not None and table.grad.layout is torch.sparse_coo
    expected = torch.zeros(ROWS, WIDTH)
    expected[3] = 2
    torch.testing.assert_close(table.grad.to_dense(), expected)


def test_jax_gets_dense_gradients() -> None:
    module = embedding()
    with jax.enable_x64(True):
        apply, params, state = polybridge.wrap(module, dst="jax")
        for step in (lambda f: f, jax.jit):
            gradient = step(jax.grad(lambda p: (apply(p, state, jnp.asarray(INDICES))[0] ** 3).sum()))(params)
            np.testing.assert_allclose(gradient["weight"], native(module), rtol=1e-12)
    with pytest.raises(ValueError, match="jax has no sparse gradients"):
        polybridge.wrap(module, dst="jax", sparse=True)


def test_only_the_rows_cross() -> None:
    """A table of 50 rows, of which 6 are looked up, does not cross back whole."""
    layer = polybridge.wrap(embedding(), dst="tf")
    for _ in range(3):
        in_tensorflow(layer)
    with count_crossings() as counted:
        in_tensorflow(layer)
    assert counted.bytes_copied < ROWS * WIDTH * 8
