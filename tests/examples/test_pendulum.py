"""The pendulum demo keeps its promise: each parameter within 1 %, by the gradients that JAX itself has."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

import jax
import torch

from examples.pendulum import data, training
from examples.pendulum.simulator import SAMPLES, Parameters, simulate


def test_every_start_finds_each_parameter_within_one_percent() -> None:
    rng = np.random.default_rng(0)
    angles = data.observe(rng)
    history = training.train(data.starts(4, rng), angles, training.UPDATES, lambda history: None)
    assert history.errors.max() <= 0.01


@pytest.mark.parametrize("samples", [training.SHORTEST, SAMPLES])
def test_the_gradient_in_torch_is_that_of_jax(samples: int) -> None:
    rng = np.random.default_rng(0)
    angles = data.observe(rng)
    pendulum = training.Pendulum(data.starts(2, rng))
    pendulum.loss(torch.from_numpy(angles), samples).sum().backward()
    expected = jax.jit(jax.grad(loss_in_jax), static_argnums=2)(pendulum.raw.detach().numpy(), angles, samples)
    torch.testing.assert_close(pendulum.raw.grad, torch.from_numpy(np.array(expected)), rtol=1e-4, atol=1e-5)


def loss_in_jax(raw: jax.Array, angles: jax.Array, samples: int) -> jax.Array:
    """The same loss with nothing to cross."""
    found = jax.vmap(simulate)(Parameters(*jax.nn.softplus(raw)))
    return jax.numpy.square(found - angles)[:, :samples].mean(axis=1).sum()
