"""How JAX takes a relay in."""

from __future__ import annotations

from collections.abc import Callable

from polybridge.core.relay import FunctionRelay, Outcome


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a JAX function."""
    raise NotImplementedError("JAX is only a source yet: give it as `src`.")
