"""Replicas and shards call the one torch module at the same time."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import torch

import polybridge

X = np.random.default_rng(0).normal(size=(8, 20000)).astype("float32")


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(call):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(32)))


class Slow(torch.nn.Module):
    """Looks at its weights twice, and at a tensor of its own that is neither weight nor buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.shift = torch.nn.Parameter(torch.tensor(0.0))
        self.factor = torch.tensor(3.0)

    def forward(self, x):
        return (x * self.scale).tanh() * self.factor + self.scale


@pytest.mark.parametrize("attempt", range(4))  # first calls, which are lent copies, are of interest
def test_each_call_computes_with_its_own_weights(attempt):
    bridged = polybridge.wrap(Slow(), dst="jax")

    def call(number):
        params = {**bridged.params, "scale": np.float32(number)}
        return jax.value_and_grad(lambda p: bridged.apply(p, {}, X[number % 8])[0].sum())(params)

    def native(number):
        scale = torch.tensor(float(number), requires_grad=True)
        x = torch.from_numpy(X[number % 8])
        y = ((x * scale).tanh() * 3 + scale).sum()
        return y.detach().numpy(), torch.autograd.grad(y, scale)[0].numpy()

    for number, (value, gradient) in enumerate(in_threads(call)):
        expected, slope = native(number)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient["scale"], slope, rtol=1e-5)


def test_each_call_draws_from_its_own_key_and_torchs_generator_stays():
    bridged = polybridge.wrap(torch.nn.Sequential(*[torch.nn.Dropout(0.5)] * 3), dst="jax")

    def call(number):
        return np.asarray(bridged.apply({}, {}, X, rng=jax.random.key(number), training=True)[0])

    alone = [call(number) for number in range(32)]
    before = torch.get_rng_state()
    for found, expected in zip(in_threads(call), alone, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)
