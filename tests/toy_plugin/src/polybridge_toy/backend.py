"""toy as a backend: the five methods that suffice for both roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import toy

import polybridge


class ToyBackend(polybridge.Backend):
    """Tensors cross as NumPy arrays, by copy; a pullback is differentiated by evaluating its function again."""

    name = "toy"
    writes = False

    def is_tensor(self, value: Any) -> bool:
        """Whether it is an array of toy."""
        return isinstance(value, toy.Array)

    def to_numpy(self, tensor: toy.Array) -> np.ndarray[Any, Any]:
        """Return the values themselves."""
        return tensor.value

    def from_numpy(self, array: np.ndarray[Any, Any]) -> toy.Array:
        """Return a copy."""
        return toy.array(array)

    def vjp(self, fn: Callable[..., Sequence[toy.Array]], primals: Sequence[toy.Array]) -> tuple[Sequence[Any], Any]:
        """Evaluate under toy's reverse mode."""
        return toy.vjp(fn, primals)

    def wrap_as_native(self, relay: polybridge.Relay) -> Callable[..., polybridge.Outcome]:
        """Return an operation of toy."""
        return lambda *xs: crossing(relay, xs)


def crossing(relay: polybridge.Relay, xs: Sequence[toy.Array | None]) -> polybridge.Outcome:
    """Evaluate a relay as one operation of toy, whose pullback is such an operation too."""
    wanted = {i: x for i, x in enumerate(xs) if x is not None and toy.is_followed(x) and x.dtype.kind not in "biu"}
    if not wanted:
        return relay(xs)
    outcome, back = relay.vjp(xs, list(wanted))
    values = [None if y is None else y.value for y in outcome.leaves]
    primals, differentiable = list(wanted.values()), outcome.differentiable

    def pullback(cts: Sequence[toy.Array | None]) -> Sequence[toy.Array | None]:
        taken = [ct for ct, is_taken in zip(cts, differentiable, strict=True) if is_taken]
        return crossing(back, [*primals, *taken]).leaves

    return outcome.with_leaves(toy.operation(values, primals, pullback))
