"""The columns of the grid by JAX's own means: from a function to a function of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.grid.analytic import TANGENT
from tests.grid.cells import Case

Fn = Callable[..., Any]


def run(case: Case, f: Fn, _: Fn, x: Any) -> Any:
    """Return what the case asks for at `x`."""
    transformed = _WAYS[case.column, case.way](f)
    return (jax.jit(transformed) if case.mode.name == "`jax.jit`" else transformed)(jnp.array(x))


def _total(f: Fn) -> Fn:
    return lambda x: f(x).sum()


def _gradient(f: Fn) -> Fn:
    return jax.grad(_total(f))


_WAYS: dict[tuple[str, str], Callable[[Fn], Fn]] = {
    ("value", "a call"): lambda f: f,
    ("first", "jax.grad"): _gradient,
    ("first", "jax.vjp"): lambda f: lambda x: jax.vjp(f, x)[1](jnp.ones_like(x))[0],
    ("second", "jax.grad"): lambda f: _gradient(_gradient(f)),
    ("jvp", "jax.jvp"): lambda f: lambda x: jax.jvp(f, (x,), (jnp.array(TANGENT),))[1],
    ("jvp", "jax.linearize"): lambda f: lambda x: jax.linearize(f, x)[1](jnp.array(TANGENT)),
    ("vmap", "jax.vmap"): jax.vmap,
    ("jacobian", "jax.jacrev"): jax.jacrev,
    ("jacobian", "jax.jacfwd"): jax.jacfwd,
    ("hessian", "jax.hessian"): lambda f: jax.hessian(_total(f)),
    ("hessian", "jax.jacrev of jax.grad"): lambda f: jax.jacrev(_gradient(f)),
}
