"""Find the parameters by PyTorch's own means: a module, a loss, Adam."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import softplus

import polybridge

from .data import TRUE, Angles
from .simulator import SAMPLES, Parameters, simulate

LEARNING_RATE = 0.05
UPDATES = 500
SHORTEST = 50  # samples, of which the first updates see the error; see `Pendulum.loss`

simulate_in_torch = polybridge.wrap(jax.vmap(simulate), src="jax", dst="torch")  # the seam


class Pendulum(nn.Module):
    """Parameters for some pendulums, each of which starts somewhere else and learns by itself."""

    def __init__(self, starts: Parameters) -> None:
        super().__init__()
        positive = torch.from_numpy(np.stack(starts))
        self.raw = nn.Parameter(positive.expm1().log())  # softplus of it is the start

    @property
    def parameters_now(self) -> Parameters:
        """The parameters, positive, each of shape (pendulums,)."""
        return Parameters(*softplus(self.raw))

    def forward(self) -> torch.Tensor:
        """Return the angles (pendulums, SAMPLES)."""
        return simulate_in_torch(self.parameters_now)

    def loss(self, observed: torch.Tensor, samples: int) -> torch.Tensor:
        """Return each pendulum's mean squared error over the first samples, in rad².

        Over a long time a wrong frequency is out of step and has no slope towards the right one, over a short time it
        has. So training begins with few samples and ends with all.
        """
        return (self() - observed)[:, :samples].square().mean(dim=1)


@dataclass
class History:
    """What a training leaves behind, an entry for each update."""

    losses: list[NDArray[np.float32]] = field(default_factory=list)  # (pendulums,)
    parameters: list[NDArray[np.float32]] = field(default_factory=list)  # (parameters, pendulums)
    seconds: float = 0.0
    first: Angles | None = None  # (pendulums, SAMPLES), before the first update
    last: Angles | None = None

    @property
    def errors(self) -> NDArray[np.float32]:
        """How far each pendulum's parameters are from the true ones now, relative to these: (parameters, pendulums)."""
        true = np.array(TRUE)[:, None]
        return np.abs(self.parameters[-1] - true) / true


def train(starts: Parameters, angles: Angles, updates: int, on_update: Callable[[History], None]) -> History:
    """Fit every start to the angles that were seen."""
    pendulum, observed = Pendulum(starts), torch.from_numpy(angles)
    optimizer = torch.optim.Adam(pendulum.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    history = History()
    history.first = pendulum().detach().numpy()

    begin = time.perf_counter()
    for update in range(updates):
        losses = pendulum.loss(observed, samples=horizon(update / updates))
        optimizer.zero_grad()
        losses.sum().backward()  # through PyTorch, then through the integrator in JAX
        optimizer.step()
        schedule.step()

        history.losses.append(losses.detach().numpy())
        history.parameters.append(np.stack([p.detach().numpy() for p in pendulum.parameters_now]))
        on_update(history)
    history.seconds = time.perf_counter() - begin
    history.last = pendulum().detach().numpy()
    return history


def horizon(progress: float) -> int:
    """Return how many samples count: few at first, all from the middle of the training on."""
    return min(SAMPLES, round(SHORTEST + (SAMPLES - SHORTEST) * 2 * progress))
