"""The modules of others as `(apply, params, state)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from polybridge.core.modules import Bridge, Functional, ModuleLibrary, Weights

Array = Any


class JaxModules(ModuleLibrary):
    """Functions beside trees of arrays."""

    name = "jax"

    def functional(self, value: Any) -> Functional | None:
        """Return None: a function is no module unless its parameters are given."""
        return None

    def native(self, bridge: Bridge) -> BridgedFunction:
        """Return a function, its parameters and its state."""
        values = [
            {slot.name: _uncommitted(bridge.fetch(slot)) for slot in bridge.slots if slot.is_state is s}
            for s in (False, True)
        ]
        return BridgedFunction(_Apply(bridge), *values)


class BridgedFunction(NamedTuple):
    """A module of another framework.

    Attributes:
        apply: `apply(params, state, *args, rng=None, training=False, **kwargs)` returns `(out, state)`.
        params: the weights by name.
        state: the statistics and counters by name.
    """

    apply: _Apply
    params: dict[str, Array]
    state: dict[str, Array]

    def sync_to_source(self, params: Mapping[str, Array], state: Mapping[str, Array] | None = None) -> Any:
        """Store parameters, and state if it is given, in the source's module, bit for bit, and return it."""
        return self.apply.bridge.send({**params, **(state or {})})


class _Apply:
    """The function of a `BridgedFunction`."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.__name__ = bridge.name

    def __call__(
        self,
        params: Mapping[str, Array],
        state: Mapping[str, Array],
        *args: Any,
        rng: Array | None = None,
        training: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Array]]:
        """Return what the module returns, and its state after the call."""
        seed = None if rng is None or not self.bridge.random else jax.random.bits(rng, (2,), "uint32")
        out, changed = self.bridge(Weights(params, state, seed), training, args, kwargs)
        return out, {**state, **changed}


def _uncommitted(x: Array) -> Array:
    """Return an array that JAX may take to any device, as it does with what it has made itself."""
    return jax.numpy.asarray(np.array(x))
