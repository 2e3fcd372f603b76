"""Flax NNX's modules as pure functions, and the modules of others as NNX modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from polybridge.core.backend import Backend
from polybridge.core.bridge import Bridge
from polybridge.core.errors import MutationError, RandomnessError, UnsupportedModuleError
from polybridge.core.functional import Functional, Slot, Weights
from polybridge.core.modules import ModuleLibrary

Array = Any
Path = tuple[Any, ...]


class FlaxModules(ModuleLibrary):
    """`flax.nnx`."""

    name = "flax"
    classes = (nnx.Module, linen.Module)

    def functional(self, value: Any) -> Functional | None:
        """Return an NNX module as a function.

        Raises:
            UnsupportedModuleError: a module of linen, which holds no weights.
        """
        if isinstance(value, linen.Module) and value.scope is None:
            raise UnsupportedModuleError.unbound(type(value).__name__)
        return FlaxFunctional(value, self.backend) if isinstance(value, nnx.Module) and callable(value) else None

    def native(self, bridge: Bridge, rngs: nnx.Rngs | None = None) -> BridgedModule:
        """Return an NNX module, which keeps `rngs` for its random numbers while training."""
        return BridgedModule(bridge, self, rngs)


class FlaxFunctional(Functional):
    """An NNX module as a function of its variables.

    `nnx.Param` and `nnx.LoRAParam` are weights, and all other variables state, but for streams of random numbers, which
    follow from the seed. Trained as it was wrapped, unless it was wrapped in evaluation mode.
    """

    def __init__(self, module: nnx.Module, backend: Backend) -> None:
        """Name the variables."""
        self.backend, self.module, self.name = backend, module, type(module).__name__
        self._graph, state = nnx.split(module)
        self._start = dict(nnx.to_flat_state(state))
        self._streams = [path for path, x in self._start.items() if isinstance(x, nnx.RngState)]
        self._paths = {".".join(map(str, path)): path for path in self._start if path not in self._streams}
        self._variables = {path: x for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable)}
        self.slots = [self._slot(name, self._start[path]) for name, path in self._paths.items()]
        self._taken = set(inspect.signature(type(module).__call__).parameters)
        self.random = bool(self._streams) or "rngs" in self._taken
        self._was_trained = any(map(_is_trained, _modes(module)))

    def read(self, slot: Slot) -> Array:
        """Return the value of a variable."""
        if slot.holder is None:
            return dict(nnx.to_flat_state(nnx.state(self.module)))[self._paths[slot.name]]
        return slot.holder.get_value()

    def write(self, values: Mapping[str, Array]) -> nnx.Module:
        """Set the variables."""
        known = {path: values[name] for name, path in self._paths.items() if name in values}
        nnx.update(self.module, nnx.from_flat_state(list(self._with(known).items())))
        return self.module

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Array]]:
        """Call a module of the same graph with other values."""
        values = {**_weights.params, **_weights.state}
        given = {path: values[name] for name, path in self._paths.items()}
        key = None if _weights.seed is None else jax.random.wrap_key_data(_weights.seed, impl="threefry2x32")
        streams = {path: self._start[path].get_value() if key is None else x for path, x in self._seeded(key)}
        flat = self._with({**given, **streams})
        module: Any = nnx.merge(self._graph, nnx.from_flat_state(list(flat.items())))
        if not _training:
            module.eval()
        elif not self._was_trained:
            module.train()
        self._complete(kwargs, _training, key)
        out = module(*args, **kwargs)
        left = dict(nnx.to_flat_state(nnx.state(module)))
        made = [p for p, x in left.items() if p not in self._start and not isinstance(x, nnx.Intermediate)]
        if made:
            raise MutationError.late(self.name, ".".join(map(str, made[0])))
        after = {path: _value(x) for path, x in left.items()}
        if key is None and any(after[path] is not x for path, x in streams.items()):
            raise RandomnessError.unseeded(self.name)
        changed = {s.name: after[self._paths[s.name]] for s in self.slots if s.is_state}
        return out, {name: x for name, x in changed.items() if x is not given[self._paths[name]]}

    def signature(self) -> inspect.Signature | None:
        """Return that of its call without what a call adds."""
        found = inspect.signature(type(self.module).__call__)
        added = ("training", "train", "deterministic", "rngs")
        return found.replace(
            parameters=[p for i, p in enumerate(found.parameters.values()) if i and p.name not in added]
        )

    def _slot(self, name: str, x: Any) -> Slot:
        is_weight = isinstance(x, (nnx.Param, nnx.LoRAParam)) and self.backend.is_differentiable(x.get_value())
        return Slot(name, self._variables.get(self._paths[name]), not is_weight, is_weight)

    def _with(self, values: Mapping[Path, Array]) -> dict[Path, Any]:
        return {
            path: self._start[path].replace(x) if isinstance(self._start[path], nnx.Variable) else x
            for path, x in values.items()
        }

    def _seeded(self, key: Array | None) -> Iterator[tuple[Path, Array]]:
        """Yield for each stream of random numbers a key of its own, and that it has given none yet."""
        for number, path in enumerate(self._streams):
            now = self._start[path].get_value()
            if key is None:
                yield path, now
            elif isinstance(self._start[path], nnx.RngKey):
                own = jax.random.fold_in(key, number)
                yield path, own if now.shape == () else jax.random.split(own, now.shape)
            else:
                yield path, jnp.zeros_like(now)

    def _complete(self, kwargs: dict[str, Any], training: bool, key: Array | None) -> None:
        """Say how to compute in the arguments that NNX and its users have for it, where the caller does not."""
        for name, value in (("training", training), ("train", training), ("deterministic", not training)):
            if name in self._taken:
                kwargs.setdefault(name, value)
        if "rngs" in self._taken and key is not None:
            kwargs.setdefault("rngs", nnx.Rngs(jax.random.fold_in(key, len(self._streams))))


class Weight(nnx.Param):
    """A weight of a module of another framework."""

    __slots__ = ("__weakref__",)  # which NNX leaves out, and `SharedVariables` needs


class FrozenWeight(nnx.Variable):
    """A weight that is not to be trained: `nnx.Param`, by which NNX finds what is, does not select it."""

    __slots__ = ("__weakref__",)


class Statistic(nnx.BatchStat):
    """State of a module of another framework."""

    __slots__ = ("__weakref__",)


class BridgedModule(nnx.Module):
    """A module of another framework: its weights and state are variables, under the source's names.

    `train()` and `eval()` say how it computes. Random numbers follow from `rngs=`, or while training from `self.rngs`.
    """

    def __init__(self, bridge: Bridge, library: ModuleLibrary, rngs: nnx.Rngs | None = None) -> None:
        """Make a variable of each slot."""
        self._bridge = bridge
        trained, kept = bridge.split(lambda slot: library.shared.get(slot, partial(_variable, bridge, slot)))
        self.params, self.state = nnx.Dict(trained), nnx.Dict(kept)
        self.deterministic = False
        self.rngs = nnx.data(rngs)

    def __call__(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Call the source's module with these variables, and set what it changes of the state.

        Args:
            args: of the module.
            rngs: `nnx.Rngs`, a stream of them or a key.
            kwargs: of the module.

        Raises:
            RandomnessError: the module draws random numbers, and there are no `rngs`.
        """
        if rngs is None and not self.deterministic:
            rngs = self.rngs
        seed = None if rngs is None or not self._bridge.random else jax.random.bits(_key(rngs), (2,), "uint32")
        held = self._held()
        trained = {name: x.get_value() for name, x in held.items() if isinstance(x, nnx.Param)}
        kept = {name: x.get_value() for name, x in held.items() if name not in trained}
        out, changed = self._bridge.keyed(
            self._bridge.weights(trained, kept, seed), not self.deterministic, args, kwargs
        )
        for name, value in changed.items():
            held[name].set_value(value)
        return out

    def set_view(self, deterministic: bool | None = None) -> None:
        """Choose how to compute, for `nnx.view`."""
        if deterministic is not None:
            self.deterministic = deterministic

    def sync_to_source(self) -> Any:
        """Store these variables' values in the source's module, bit for bit, and return it."""
        values = {name: x.get_value() for name, x in self._held().items()}
        self._bridge.check(values)
        return self._bridge.send(values)

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        held = self._held()
        for slot in self._bridge.slots:
            held[slot.name].set_value(self._bridge.fetch(slot))

    def _held(self) -> dict[str, Any]:
        return {**dict(self.params.items()), **dict(self.state.items())}


def _variable(bridge: Bridge, slot: Slot) -> nnx.Variable:
    kind = Weight if slot.trainable else Statistic if slot.is_state else FrozenWeight
    return kind(bridge.fetch(slot))


def _key(rngs: Any) -> Array:
    if isinstance(rngs, Mapping):
        raise TypeError(f"`rngs=` of a bridged module is an `nnx.Rngs`, a stream of it or a key, got {rngs!r:.80}.")
    return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs() if isinstance(rngs, nnx.RngStream) else rngs


def _value(x: Any) -> Array:
    return x.get_value() if isinstance(x, nnx.Variable) else x


def _modes(module: nnx.Module) -> Iterator[Any]:
    """Yield what `eval` and `train` set: whether not to draw random numbers, and not to count a batch."""
    for _, inner in nnx.iter_modules(module):
        for name in ("deterministic", "use_running_average"):
            if hasattr(inner, name):
                yield getattr(inner, name)


def _is_trained(mode: Any) -> bool:
    return mode is None or not mode
