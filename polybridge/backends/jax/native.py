"""How JAX takes a relay in: as operations of `primitives.py`, or at once where nothing is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polybridge.backends.jax import convert, primitives
from polybridge.backends.jax.operations import Operation
from polybridge.core.relay import FunctionRelay, Outcome


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of JAX arrays that every transform of JAX follows."""
    modes, operations, owners = relay.exchange.source.modes, dict[Any, Operation](), dict[Any, int]()

    def operation() -> Operation:
        """Return that of the source's modes: JAX remembers what types an operation returns, which depend on them."""
        key = modes()
        return operations.get(key) or operations.setdefault(key, Operation(relay, owners=owners))

    def native(*xs: jax.Array) -> Outcome:
        if _is_traced(xs):
            types = [jax.typeof(x) for x in xs]
            current = operation().now(types)
            leaves = primitives.evaluate(current, xs)
            plan = current.of(types, leaves).plan(types)  # known by now, from a trace or from the values
            return Outcome(leaves, plan.structure, plan.differentiable)
        # one differentiated run, to see whether it holds weights
        outcome = relay(xs) if relay.told else relay.vjp(xs, ())[0]
        convert.looked_at(outcome.leaves, relay.call)
        where = convert.place(xs)
        return outcome if where is None else outcome.with_leaves(convert.placed(outcome.leaves, where))

    return native


def _is_traced(xs: tuple[jax.Array, ...]) -> bool:
    """Whether a transform is to see the call; a function without arguments is staged by `jax.jit` too."""
    return any(isinstance(x, jax.core.Tracer) for x in xs) or convert.is_tracing()
