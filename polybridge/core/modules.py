"""A module with weights and state, as a pure function of both and as another framework holds it.

A source gives each of its modules as a `Functional`: named slots, and a function that computes with the values it is
given for them. A destination holds these values as its own variables; at every call it passes them, through the same
relay as any other function's arguments, and stores what the call has changed. So the destination's variables are what
the source computes with, and the source's own are not touched until `send`.
"""

from __future__ import annotations

import inspect
import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from polybridge.core.backend import Backend
from polybridge.core.errors import DetachedStateWarning, FactoryError, MutationError, warn
from polybridge.core.exchange import move
from polybridge.core.factories import reference
from polybridge.core.trees import flatten, unflatten

Tensor = Any


@dataclass(frozen=True)
class Slot:
    """One weight or one piece of state of a module.

    Attributes:
        name: where it is, as `encoder.0.weight`; unique in its module.
        holder: the source's own variable, which two modules may share; None where values have no identity.
        is_state: whether the module itself changes it (a statistic, a counter), and no optimiser does.
        trainable: whether it wants gradients now; a frozen weight does not.
    """

    name: str
    holder: Any
    is_state: bool
    trainable: bool


class Weights(NamedTuple):
    """What a module computes with besides its arguments.

    Attributes:
        params: a tensor for each weight, by name.
        state: a tensor for each piece of state, by name.
        seed: two uint32 numbers from which the call's random numbers follow; None leaves them to the source.
    """

    params: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    seed: Tensor | None


class Ran(NamedTuple):
    """What one call of a module gives.

    Attributes:
        result: what the module returned.
        changed: the state that the call has changed, by name; weights too, where a module assigns to them.
        losses: what the module adds to the loss besides: regularisers and the like.
    """

    result: Any
    changed: dict[str, Tensor]
    losses: Sequence[Tensor] = ()


class Functional(ABC):
    """A module of a source as a pure function.

    Attributes:
        backend: of its tensors.
        module: what the user wrapped.
        name: how messages and native modules call it.
        slots: its weights and state; until it is built, those that it has so far.
        random: whether a call may draw random numbers.
        built: whether the slots are all there; if not, `build` makes them.
    """

    backend: Backend
    module: Any
    name: str
    slots: Sequence[Slot]
    random: bool = True
    built: bool = True

    @abstractmethod
    def read(self, slot: Slot) -> Tensor:
        """Return the source's current value."""

    @abstractmethod
    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Store values in the source, and return what the user wrapped, or what stands for it, with them."""

    @abstractmethod
    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, ...]:
        """Compute with the weights that are given, and leave the source's own alone.

        A call that finds out what a first call has to, such as that weights are missing, raises `UnbuiltError`; after
        `build` it has all that it needs.

        Args:
            args: of the module.
            _weights: values for all slots.
            _training: whether to compute as while training.
            kwargs: of the module.

        Returns:
            The fields of a `Ran`, or the first two: a plain tuple, which every compiler knows.
        """

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Slot]:
        """Make the weights that the module makes at its first call, and return their slots, which `slots` has now.

        Args:
            args: of that call.
            kwargs: of that call.
        """
        return ()

    def held(self) -> Iterator[Any]:
        """Yield the source's variables."""
        return (slot.holder for slot in self.slots)

    def parts(self) -> tuple[Any, ...]:
        """Return what `wrap` takes first, as a tuple: the module, or a function with its params and state."""
        return (self.module,)


class Applied(Functional):
    """A function and the trees of weights and state that it takes first, as JAX's modules are written.

    `fn(params, *args)` returns the result, or with a state `fn(params, state, *args)` returns it and the new state. It
    gets `training=` and `rng=` (two uint32 numbers, which are a JAX key) if it has arguments of these names.
    """

    def __init__(self, fn: Callable[..., Any], backend: Backend, params: Any, state: Any = None) -> None:
        """Name the leaves of the trees by their paths.

        Raises:
            UnsupportedTensorError: a weight is no tensor of the backend.
        """
        self.backend, self.module, self.name = backend, fn, getattr(fn, "__name__", type(fn).__name__)
        self._trees = {False: params, True: state}
        self._named = {is_state: _leaves(tree, backend) for is_state, tree in self._trees.items()}
        self.slots = [
            Slot(name, None, is_state, not is_state and backend.is_differentiable(x))
            for is_state, named in self._named.items()
            for name, x in named.items()
        ]
        taken = _parameters(fn)
        self.random, self._takes_training = "rng" in taken, "training" in taken

    def parts(self) -> tuple[Any, ...]:
        """Return the function and its trees."""
        params, state = (self._rebuilt(is_state, named) for is_state, named in self._named.items())
        return self.module, params, state

    def read(self, slot: Slot) -> Tensor:
        """Return a leaf."""
        return self._named[slot.is_state][slot.name]

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Return the trees with other leaves: `params`, or `(params, state)`."""
        self._named = {s: {name: values.get(name, x) for name, x in named.items()} for s, named in self._named.items()}
        params, state = (self._rebuilt(s, named) for s, named in self._named.items())
        return params if self._trees[True] is None else (params, state)

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the function."""
        if self._takes_training:
            kwargs.setdefault("training", _training)
        if self.random and _weights.seed is not None:
            kwargs.setdefault("rng", _weights.seed)
        params = self._rebuilt(False, _weights.params)
        if self._trees[True] is None:
            return self.module(params, *args, **kwargs), {}
        out, state = self.module(params, self._rebuilt(True, _weights.state), *args, **kwargs)
        return out, _leaves(state, self.backend)

    def _rebuilt(self, is_state: bool, values: Mapping[str, Tensor]) -> Any:
        names = iter(self._named[is_state])
        leaves, treedef = flatten(self._trees[is_state])
        return unflatten(treedef, [values[next(names)] if self.backend.is_tensor(x) else x for x in leaves])


def _leaves(tree: Any, backend: Backend) -> dict[str, Tensor]:
    """Return the tensors of a tree by their paths, as `layers.0.kernel`."""
    leaves, treedef = flatten(tree)
    paths = [".".join(map(str, path)) or "params" for path in treedef.paths()]
    return {path: x for path, x in zip(paths, leaves, strict=True) if backend.is_tensor(x)}


def _parameters(fn: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(fn).parameters
    except ValueError:  # of a builtin
        return ()


class Bridge:
    """A module of a source as a destination uses it.

    Copying it copies nothing, since the source's weights are not what anybody computes with. Pickling it pickles the
    source, or the name of the factory that makes one.

    Args:
        functional: the module.
        dest: the destination's backend.
        function: `functional.run` as a native function of the destination.
        options: what `wrap` was given beside the module.
    """

    def __init__(
        self,
        functional: Functional,
        dest: Backend,
        function: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the parts."""
        self.functional, self.dest, self._function = functional, dest, function
        self.options = dict(options or {})
        self._mentioned = False

    def __copy__(self) -> Bridge:
        """Return itself."""
        return self

    def __deepcopy__(self, _: Any) -> Bridge:
        """Return itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again elsewhere.

        Raises:
            FactoryError: the source cannot be pickled, and no factory was given.
        """
        from polybridge.core.wrapping import bridged_again  # which imports this module

        names = [slot.name for slot in self.slots]
        factory = self.options.get("factory")
        found: dict[str, Any]
        if factory is not None:
            found = {"factory": reference(factory)}
        else:
            try:
                found = {"pickled": pickle.dumps(self.functional.parts())}
            except Exception as error:  # whatever the source's classes raise
                reason = f"its source cannot be pickled ({type(error).__name__}: {error})"
                raise FactoryError.missing(self.name, reason) from error
        return bridged_again, (found, {**self.options, "factory": None}, names)

    @property
    def name(self) -> str:
        """How the native module is called."""
        return self.functional.name

    @property
    def random(self) -> bool:
        """Whether a call wants a seed."""
        return self.functional.random

    @property
    def slots(self) -> Sequence[Slot]:
        """The weights and state."""
        return self.functional.slots

    @property
    def built(self) -> bool:
        """Whether the slots are all there."""
        return self.functional.built

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Slot]:
        """Make the weights that the source makes at its first call, and return their slots.

        Args:
            args: of that call, with the destination's tensors.
            kwargs: of that call.
        """
        source = self.functional.backend
        leaves, treedef = flatten((tuple(args), dict(kwargs)))
        leaves = [move(x, self.dest, source, own=True) if self.dest.is_tensor(x) else x for x in leaves]
        args, kwargs = unflatten(treedef, leaves)
        made: list[Slot] = []
        source.run(lambda: made.extend(self.functional.build(args, kwargs)))
        return made

    def __call__(
        self, weights: Weights, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's result, and the state that the call has changed; warn of losses, which are dropped.

        Raises:
            MutationError: the module has assigned to a weight. `run` is for destinations that can store it.
        """
        result, changed, losses = self.run(weights, training, args, kwargs)
        assigned = changed.keys() & weights.params.keys()
        if assigned:
            raise MutationError.weight(self.name, min(assigned))
        if losses and not self._mentioned:
            self._mentioned = True
            warn(DetachedStateWarning.losses(self.name, len(losses)))
        return result, changed

    def run(self, weights: Weights, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ran:
        """Return the module's result, the state that the call has changed, and what it adds to the loss."""
        return Ran(*self._function(*args, **kwargs, _weights=weights, _training=training))

    def fetch(self, slot: Slot) -> Tensor:
        """Return the source's value as a tensor of the destination with memory of its own."""
        return move(self.functional.read(slot), self.functional.backend, self.dest, own=True)

    def send(self, values: Mapping[str, Tensor]) -> Any:
        """Store the destination's values in the source, bit for bit, and return the source."""
        source = self.functional.backend
        return self.functional.write({name: move(x, self.dest, source, own=True) for name, x in values.items()})


class ModuleLibrary(ABC):
    """How a framework's modules become functions, and how it holds a module of another."""

    name: ClassVar[str]
    """The canonical name, as given to `wrap(src=..., dst=...)`."""
    builds: ClassVar[bool] = False
    """Whether `native` takes modules that make their weights at the first call, and calls `Bridge.build` then."""

    def __init__(self, backend: Backend) -> None:
        """Begin without variables.

        Args:
            backend: of the library's tensors.
        """
        self.backend = backend
        self.shared = SharedVariables()

    @abstractmethod
    def functional(self, value: Any) -> Functional | None:
        """Return a module of this library as a function; None if `value` is no such module."""

    @abstractmethod
    def native(self, bridge: Bridge) -> Any:
        """Return a module of this library that holds the weights and computes with the source."""


class SharedVariables:
    """The destination's variable for each variable of a source, while both are alive: what is tied stays tied."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def get(self, slot: Slot, make: Callable[[], Any]) -> Any:
        """Return the variable of a slot, made if nobody has it."""
        if slot.holder is None:
            return make()
        holder, variable = self._known.get(id(slot.holder), (_dead, _dead))
        found = variable() if holder() is slot.holder else None
        if found is None:
            found = make()
            key = id(slot.holder)
            gone = weakref.ref(slot.holder, lambda _: self._known.pop(key, None))
            self._known[key] = gone, weakref.ref(found)
        return found


def _dead() -> None:
    return None
