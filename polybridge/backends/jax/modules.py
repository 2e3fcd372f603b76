"""The modules of others as `(apply, params, state)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from polybridge.core.bridge import Bridge
from polybridge.core.errors import WeightsError
from polybridge.core.functional import Functional
from polybridge.core.modules import ModuleLibrary

Array = Any


class JaxModules(ModuleLibrary):
    """Functions beside trees of arrays."""

    name = "jax"

    def functional(self, value: Any) -> Functional | None:
        """Return None: a function is no module unless its parameters are given."""
        return None

    def native(self, bridge: Bridge) -> BridgedFunction:
        """Return a function, its parameters and its state."""
        return BridgedFunction(_Apply(bridge), *bridge.split(lambda slot: _uncommitted(bridge.fetch(slot))))


class BridgedFunction(NamedTuple):
    """A module of another framework.

    Attributes:
        apply: `apply(params, state, *args, rng=None, training=False, **kwargs)` returns `(out, state)`.
        params: the weights to train by name.
        state: by name the statistics and counters, and the weights that are frozen, which no optimiser is to see. A
            weight that moves to the other dict is trained, or frozen.
    """

    apply: _Apply
    params: dict[str, Array]
    state: dict[str, Array]

    def sync_to_source(self, params: Mapping[str, Array], state: Mapping[str, Array] | None = None) -> Any:
        """Store parameters and state in the source's module, bit for bit, and return it.

        Args:
            params: the trained weights.
            state: after training; where it is not given, the source keeps its own.

        Raises:
            WeightsError: they are not those of the module.
        """
        bridge = self.apply.bridge
        values = {**self.state, **(state or {}), **params}
        bridge.check(values)
        if state is None:
            values = dict(params)
        return bridge.send(values)

    def sync_from_source(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return `(params, state)` with the present values of the source's module."""
        return self.apply.bridge.split()


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
        """Return what the module returns, and its state after the call.

        Args:
            params: the weights to train, by name.
            state: everything else that the module computes with, by name.
            args: of the module.
            rng: a key, of either kind, from which the random numbers of the call follow.
            training: whether to compute as while training.
            kwargs: of the module.

        Raises:
            WeightsError: `params` and `state` are not those of the module.
            RandomnessError: the module draws random numbers, and there is no `rng`.
        """
        for name, given in (("params", params), ("state", state)):
            if not isinstance(given, Mapping):
                raise WeightsError.no_mapping(self.bridge.name, name, type(given))
        seed = None if rng is None or not self.bridge.random else jax.random.bits(rng, (2,), "uint32")
        out, changed = self.bridge.keyed(self.bridge.weights(params, state, seed), bool(training), args, kwargs)
        return out, {**state, **changed}


def _uncommitted(x: Array) -> Array:
    """Return an array that JAX may take to any device, as it does with what it has made itself."""
    return jax.numpy.asarray(np.array(x))
