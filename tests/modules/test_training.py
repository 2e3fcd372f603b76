"""A bridged network learns what its native twin learns, from the same weights and batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np
import pytest
import torch

import polybridge
from tests.modules import trainers
from tests.modules.architectures import ARCHITECTURES, Architecture

STEPS = 30
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
"""Of the largest difference in a weight, relative to the largest number in it."""


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Make float64 or float32 what Keras builds with and JAX computes in."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        with jax.enable_x64(dtype == "float64"):
            yield
    finally:
        keras.config.set_dtype_policy(before)


def made(architecture: Architecture, src: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """Return a network, and its twin with the same weights."""
    if src == "torch":
        torch.manual_seed(0)
        modules = [m.to(getattr(torch, dtype)) for m in architecture.in_torch()]
        return modules, copy.deepcopy(modules)
    keras.utils.set_random_seed(0)
    modules, twins = architecture.in_keras(), architecture.in_keras()
    for m, twin in zip(modules, twins, strict=True):
        twin.set_weights(m.get_weights())
    return modules, twins


def trained(modules: list[Any], dst: str, architecture: Architecture, dtype: str) -> list[Any]:
    """Train modules in another framework, and return them with what they have learnt."""
    bridged = [polybridge.wrap(m, dst=dst) for m in modules]
    batches = architecture.batches(STEPS, dtype)
    if dst == "jax":
        found = trainers.in_jax(architecture.kind, bridged, batches)
        return [b.sync_to_source(*state) for b, state in zip(bridged, found, strict=True)]
    train = trainers.in_torch if dst == "torch" else trainers.in_tensorflow
    train(architecture.kind, bridged, batches)
    return [b.sync_to_source() for b in bridged]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("src, dst", [("torch", "keras"), ("torch", "jax"), ("keras", "torch"), ("keras", "jax")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_bridged_network_learns_what_its_twin_learns(name: str, src: str, dst: str, dtype: str) -> None:
    architecture = ARCHITECTURES[name]
    with precision(dtype):
        modules, twins = made(architecture, src, dtype)
        initial = trainers.weights_of(twins)
        train = trainers.in_torch if src == "torch" else trainers.in_tensorflow
        train(architecture.kind, twins, architecture.batches(STEPS, dtype))
        synced = trained(modules, dst, architecture, dtype)
    assert all(a is b for a, b in zip(synced, modules, strict=True))
    found, expected = trainers.weights_of(modules), trainers.weights_of(twins)
    for before, x, y in zip(initial, found, expected, strict=True):
        assert x.dtype == y.dtype
        assert not np.array_equal(before, y)  # everything learns
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE[dtype] * np.abs(y).max())


def test_a_frozen_backbone_stays_as_it_is_under_a_native_head() -> None:
    """In either direction: only the head learns, and the backbone keeps every bit, statistics included."""
    architecture = ARCHITECTURES["cnn with batch norm"]
    batches = list(architecture.batches(5, "float32"))

    keras.utils.set_random_seed(0)
    (model,) = architecture.in_keras()
    backbone = polybridge.wrap(model, dst="torch").requires_grad_(False).eval()
    head = torch.nn.Linear(10, 10)
    before, start = trainers.weights_of([model, backbone]), head.weight.detach().clone()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], 0.1, weight_decay=0.1)
    for (images,), labels in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(backbone(torch.from_numpy(images))), torch.from_numpy(labels)).backward()
        optimizer.step()
    backbone.sync_to_source()
    assert not torch.equal(head.weight, start)
    assert all(map(np.array_equal, trainers.weights_of([model, backbone]), before))

    (net,) = architecture.in_torch()
    layer = polybridge.wrap(net, dst="keras")
    layer.trainable = False
    whole = keras.Sequential([keras.Input((8, 8, 1)), layer, keras.layers.Dense(10)])
    before, start = trainers.weights_of([net]), np.array(whole.layers[-1].kernel)
    whole.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    whole.fit(np.concatenate([x for (x,), _ in batches]), np.concatenate([y for _, y in batches]), verbose=0)
    layer.sync_to_source()
    assert not np.array_equal(whole.layers[-1].kernel, start)
    assert all(map(np.array_equal, trainers.weights_of([net]), before))
