"""Equinox's modules as pure functions, and the modules of others as Equinox modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from polybridge.core.applied import Applied
from polybridge.core.bridge import Bridge
from polybridge.core.errors import WeightsError
from polybridge.core.functional import Functional
from polybridge.core.modules import ModuleLibrary

Array = Any


class EquinoxModules(ModuleLibrary):
    """`equinox.Module`, alone or in a pair with the `equinox.nn.State` that it is called with."""

    name = "equinox"
    classes = (eqx.Module,)

    def functional(self, value: Any) -> Functional | None:
        """Return a module as a function; the first state is that which the module itself has, if it has one."""
        module, state = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not (isinstance(module, eqx.Module) and callable(module)):
            return None
        if state is None and _has_state(module):
            module, state = eqx.nn.make_with_state(lambda: module)()
        return EquinoxFunctional(_Called(module), self.backend, module, state, _names(module))

    def native(self, bridge: Bridge) -> BridgedModule:
        """Return a module, which has its first state if it is one with state."""
        params, state = bridge.split()
        return BridgedModule(params, eqx.nn.StateIndex(state), False, bridge, bool(state))


class EquinoxFunctional(Applied):
    """A module, alone or with its state, as a function of its arrays."""


class _Called:
    """Calls a module as Equinox's are called, for `Applied`."""

    def __init__(self, module: Any) -> None:
        self.__name__ = type(module).__name__
        taken = inspect.signature(module.__call__).parameters
        self._takes_key = "key" in taken
        # What `Applied` is to give: the trees come first, and without `key` no random numbers are drawn.
        trees = ["params", "state"] if "state" in taken else ["params"]
        given = ["training", "rng"] if self._takes_key else ["training"]
        self.__signature__ = inspect.Signature(
            sorted(
                [
                    *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in trees),
                    *(p for name, p in taken.items() if name not in ("state", "key")),
                    *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given),
                ],
                key=lambda p: p.kind,
            )
        )

    def __call__(self, module: Any, *args: Any, training: bool, rng: Array | None = None, **kwargs: Any) -> Any:
        if self._takes_key and rng is not None:
            kwargs.setdefault("key", jax.random.wrap_key_data(rng, impl="threefry2x32"))
        if args and isinstance(args[0], eqx.nn.State):
            kwargs["state"], args = args[0], args[1:]
        # A module that was made for inference is trained when a destination trains it, as one of its own would be.
        return eqx.nn.inference_mode(module, value=not training)(*args, **kwargs)


class BridgedModule(eqx.nn.StatefulLayer):
    """A module of another framework: its weights are leaves, its state is in `equinox.nn.State`.

    Call `model(*args, key=key)`, or with state `model(*args, state, key=key)`, which returns `(out, state)`. The flag
    of `equinox.nn.inference_mode` says how it computes. Weights that are frozen count as state: what is a leaf here is
    what optimisers change.

    Attributes:
        params: the weights to train, by name.
        index: where the state is: the statistics, counters and frozen weights by name.
        inference: whether to compute as for evaluation.
    """

    params: dict[str, Array]
    index: eqx.nn.StateIndex
    inference: bool
    bridge: Bridge = eqx.field(static=True)
    has_state: bool = eqx.field(static=True)

    def is_stateful(self) -> bool:
        """Whether it is called with a state."""
        return self.has_state

    def __call__(self, *args: Any, state: eqx.nn.State | None = None, key: Array | None = None, **kwargs: Any) -> Any:
        """Return what the module returns, and the state after the call if it has one.

        Args:
            args: of the module; the last may be the state.
            state: from `equinox.nn.State(model)` or `equinox.nn.make_with_state`.
            key: of either kind, from which the random numbers of the call follow.
            kwargs: of the module.

        Raises:
            WeightsError: it has state, and was called without.
            RandomnessError: it draws random numbers, and there is no `key`.
        """
        if args and isinstance(args[-1], eqx.nn.State):
            *args, state = args  # type: ignore[assignment]
        if self.has_state and state is None:
            raise WeightsError.stateful(self.bridge.name)
        seed = None if key is None or not self.bridge.random else jax.random.bits(key, (2,), "uint32")
        kept = self._kept(state)
        out, changed = self.bridge.keyed(self.bridge.weights(self.params, kept, seed), not self.inference, args, kwargs)
        if state is None:
            return out
        return out, state.set(self.index, {**kept, **changed}) if changed else state

    def sync_to_source(self, state: eqx.nn.State | None = None) -> Any:
        """Store the weights, and the state if it is given, in the source's module, bit for bit, and return it."""
        if state is None:
            return self.bridge.send(self.params)
        return self.bridge.send({**self._kept(state), **self.params})

    def sync_from_source(self) -> BridgedModule:
        """Return the module with the values of the source's, and with its state as first state."""
        params, state = self.bridge.split()
        return BridgedModule(params, eqx.nn.StateIndex(state), self.inference, self.bridge, self.has_state)

    def _kept(self, state: eqx.nn.State | None) -> Mapping[str, Array]:
        return {} if state is None or not self.has_state else state.get(self.index)


def _has_state(module: eqx.Module) -> bool:
    return any(jax.tree.leaves(index.init) for _, index in _indices(module))


def _names(module: eqx.Module) -> Callable[[str], str]:
    """Return how a path in the module's state, which has numbers for the places in the module, is called by these."""
    places = list({index.marker: place for place, index in reversed(_indices(module))}.values())[::-1]

    def name(path: str) -> str:
        number, *rest = path.split(".")
        return ".".join([places[int(number)], *rest]) if number.isdigit() and int(number) < len(places) else path

    return name


def _indices(module: eqx.Module) -> list[tuple[str, eqx.nn.StateIndex]]:
    """Return the places of the state by path, in the order in which Equinox keeps it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=_is_index)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves if _is_index(x)]


def _is_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)
