"""torch modules and a JAX pair that an import finds, for tests that save modules and load them in another process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Linear, batch normalisation, dropout: weights, state and randomness."""

    def __init__(self, width: int = 6, dropout: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class LazyPair(nn.Module):
    """Two inputs, of which the module does not know the widths."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.LazyLinear(3), nn.LazyLinear(3), nn.LazyBatchNorm1d()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.norm(self.left(left) + self.right(right))


def scaled(params: Any, state: Any, x: Any, training: bool = False) -> Any:
    """A function as JAX writes modules: `(params, state, x)` to `(out, state)`."""
    return x @ params["w"] + params["b"], {"steps": state["steps"] + int(training)}


def scaled_pair() -> Any:
    """Return the function, its weights and its state."""
    import jax.numpy as jnp

    return scaled, {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, {"steps": jnp.zeros((), jnp.int32)}
