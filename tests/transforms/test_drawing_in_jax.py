"""Asks what compiled code of JAX remembers of random generators, and of which torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.core import residuals
from polybridge.core.registry import get_backend

Fn = Callable[..., Any]
X = jnp.linspace(0.1, 2.0, 16, dtype=jnp.float32)  # whatever JAX has been switched to


def into_jax(fn: Fn, src: str = "torch") -> Fn:
    return polybridge.wrap(fn, src=src, dst="jax")  # type: ignore[no-any-return]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows as the state of torch's generators is captured."""
    captured: list[Any] = []
    backend = get_backend("torch")
    capture = backend.randomness

    def counting() -> Any:
        captured.append(capture())
        return captured[-1]

    monkeypatch.setattr(backend, "randomness", counting)
    return captured


def convolved(x: torch.Tensor) -> torch.Tensor:
    layer = torch.ones(1, 1, 3)
    return torch.nn.functional.conv1d(x[None, None], layer).softmax(-1)[0, 0] @ torch.eye(14)


def of_jax(x: torch.Tensor) -> torch.Tensor:
    return polybridge.wrap(jnp.sin, src="jax", dst="torch")(x)  # type: ignore[no-any-return]


def of_tensorflow(x: torch.Tensor) -> torch.Tensor:
    return polybridge.wrap(tf.sin, src="tf", dst="torch")(x)  # type: ignore[no-any-return]


@torch.library.custom_op("polybridge_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, ct: ct)

RECURRENT = torch.nn.LSTM(4, 4, 2, dropout=0.5).requires_grad_(False)
DRAWING: dict[str, Fn] = {
    "dropout": lambda x: torch.nn.functional.dropout(x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.reshape(1, 4, 4)] * 3, dropout_p=0.5),
    "recurrent layers": lambda x: RECURRENT(x.reshape(4, 4))[0],
    "noise": lambda x: x * torch.randn(16),
    "noise in place": lambda x: x * torch.empty(16).exponential_(),
    "a permutation": lambda x: x[torch.randperm(16)],
    "rrelu": lambda x: torch.nn.functional.rrelu(x - 1, training=True),
    "a distribution": lambda x: torch.distributions.Gamma(x, 1.0, validate_args=False).rsample(),
    "a binomial": lambda x: x * torch.binomial(torch.full((16,), 9.0), torch.tensor(0.5)),
    "an operation of somebody's own": noisy,
    "another framework inside": of_jax,
    "TensorFlow inside": of_tensorflow,
}


@pytest.mark.parametrize("name", DRAWING)
def test_the_generators_are_captured_where_a_function_may_draw(name: str, captures: list[Any]) -> None:
    wrapped = into_jax(DRAWING[name])
    step = jax.jit(jax.grad(lambda x: wrapped(x).sum()))
    step(X)
    captures.clear()
    step(X).block_until_ready()
    assert len(captures) == 1


@pytest.mark.parametrize("fn", [torch.sin, convolved, lambda x: torch.nn.functional.dropout(x, training=False)])
def test_the_generators_are_left_alone_where_a_function_draws_nothing(fn: Fn, captures: list[Any]) -> None:
    wrapped = into_jax(fn)
    step = jax.jit(jax.grad(lambda x: wrapped(x).sum()))
    step(X).block_until_ready()
    step(X).block_until_ready()
    assert not captures


def late(wrapped: Fn) -> Fn:
    """Return a function whose backward begins when most of its residuals have made room for others."""

    def run(x: Any) -> Any:
        ys, pull = jax.vjp(lambda x: jax.lax.map(lambda i: wrapped(x + 0 * i), jnp.arange(100)), x)
        return pull(jnp.ones_like(ys))[0]

    return jax.jit(run)


def test_what_draws_nothing_is_evaluated_again(monkeypatch: pytest.MonkeyPatch, captures: list[Any]) -> None:
    monkeypatch.setattr(residuals._waiting, "entries", 16)
    np.testing.assert_allclose(late(into_jax(torch.sin))(X), 100 * np.cos(X), rtol=1e-5)
    assert not captures


def test_what_begins_to_draw_after_its_trace_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results do not tell: they are the same, and the derivatives are not."""
    monkeypatch.setattr(residuals._waiting, "entries", 16)
    training = False

    def scaled(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rand(16) if training else torch.ones(16)
        return x.detach() + scale * (x - x.detach())

    run = late(into_jax(scaled))
    np.testing.assert_allclose(run(X), 100.0)
    training = True
    with pytest.raises(Exception, match="Another evaluation gave other values"):
        jax.block_until_ready(run(X))
