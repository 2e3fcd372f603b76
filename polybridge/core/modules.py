"""A module with weights and state, as a pure function of both and as another framework holds it.

A source gives each of its modules as a `Functional`: named slots, and a function that computes with the values it is
given for them. A destination holds these values as its own variables; at every call it passes them, through the same
relay as any other function's arguments, and stores what the call has changed. So the destination's variables are what
the source computes with, and the source's own are not touched until `send`.
"""

from __future__ import annotations

import inspect
import pickle
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polybridge.core.backend import Backend
from polybridge.core.errors import (
    DetachedStateWarning,
    FactoryError,
    MutationError,
    RandomnessError,
    WeightsError,
    warn,
)
from polybridge.core.exchange import move
from polybridge.core.factories import reference
from polybridge.core.specs import TensorSpec, dtype
from polybridge.core.trees import ARRAYS, flatten, unflatten

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
        state: a tensor for each piece of state, by name; and for each weight that the call is not to differentiate.
        seed: two uint32 numbers from which the call's random numbers follow; None leaves them to the source.
        compute: the dtype of mixed precision, "float16" or "bfloat16", for a source that has a mode for it; else None.
    """

    params: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    seed: Tensor | None
    compute: str | None = None


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
        autocasts: whether `run` takes `compute`, and chooses by itself what to compute in which dtype.
        built: whether the slots are all there; if not, `build` makes them.
    """

    backend: Backend
    module: Any
    name: str
    slots: Sequence[Slot]
    random: bool = True
    autocasts: bool = False
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

        Raises:
            RandomnessError: the module draws random numbers, and there is no seed.
        """

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make the slots that a call with such arguments, tensors of the source, asks for."""

    def draws(self, training: bool) -> bool | None:
        """Return whether calls in this mode draw random numbers, as far as is known; None if nobody has tried."""
        return self.random

    def draws_unseen(self, training: bool) -> bool:
        """Return whether a call without a seed draws in this mode from a generator that no caller sees, if it is known.

        False for a source that would raise a RandomnessError by itself, or whose generators are part of its state.
        """
        return False

    def signature(self) -> inspect.Signature | None:
        """Return what the module is called with, besides weights, mode and random numbers; None if nobody knows."""
        return _signature(self.module)

    def promising(self, specs: Any) -> tuple[Callable[..., Any], Any]:
        """Return `run` with all of the state as what has changed, and the specs of all that it then returns.

        Args:
            specs: of the module's result.
        """
        state = {slot.name: self.backend.spec(self.read(slot)) for slot in self.slots if slot.is_state}

        def run(*args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
            result, changed, *_ = self.run(*args, _weights=_weights, _training=_training, **kwargs)
            return result, {name: changed.get(name, _weights.state[name]) for name in state}

        run.__self__ = self  # type: ignore[attr-defined]  # what holds the variables; see `closures`
        return run, (specs, state)

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

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Backend,
        params: Any,
        state: Any = None,
        names: Callable[[str], str] = str,
    ) -> None:
        """Name the tensors of the trees by their paths.

        Args:
            fn: the function.
            backend: of its tensors.
            params: the first tree.
            state: the second, if it takes one.
            names: a better name for a path in the state.

        Raises:
            UnsupportedTensorError: a weight is no tensor of the backend.
        """
        self.backend, self.module, self.name = backend, fn, getattr(fn, "__name__", type(fn).__name__)
        self._stateful = state is not None
        self._params, self._with_params = backend.parts(params)
        self._state, self._with_state = backend.parts(state)
        self._names = {path: names(path) for path in self._state}
        self._names = {path: f"state.{name}" if name in self._params else name for path, name in self._names.items()}
        self.slots = [
            # Integers, such as a table, are nothing that an optimiser of any framework takes.
            *(Slot(name, None, not (d := backend.is_differentiable(x)), d) for name, x in self._params.items()),
            *(Slot(self._names[name], None, True, False) for name in self._state),
        ]
        taken = _parameters(fn)
        self.random, self._takes_training = "rng" in taken, "training" in taken

    def parts(self) -> tuple[Any, ...]:
        """Return the function and its trees."""
        state = self._with_state(self._state) if self._stateful else None
        return self.module, self._with_params(self._params), state

    def read(self, slot: Slot) -> Tensor:
        """Return a tensor."""
        found = self._params.get(slot.name)
        return self._named_state(self._state)[slot.name] if found is None else found

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Return the trees with other tensors: `params`, or `(params, state)`."""
        self._params = {name: values.get(name, x) for name, x in self._params.items()}
        self._state = {name: values.get(self._names[name], x) for name, x in self._state.items()}
        params = self._with_params(self._params)
        return (params, self._with_state(self._state)) if self._stateful else params

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the function."""
        if self._takes_training:
            kwargs.setdefault("training", _training)
        if self.random and _weights.seed is not None:
            kwargs.setdefault("rng", _weights.seed)
        values = {**_weights.params, **_weights.state}
        params = self._with_params({name: values[name] for name in self._params})
        if not self._stateful:
            return self.module(params, *args, **kwargs), {}
        state = self._with_state({name: values[self._names[name]] for name in self._state})
        out, state = self.module(params, state, *args, **kwargs)
        after, _ = self.backend.parts(state)
        if after.keys() != self._state.keys():
            missing, unknown = self._state.keys() - after.keys(), after.keys() - self._state.keys()
            raise WeightsError.unlike(f"{self.name}'s new state", sorted(missing), sorted(unknown))
        return out, self._named_state(after)

    def signature(self) -> inspect.Signature | None:
        """Return that of the function without what a call adds."""
        found = _signature(self.module)
        if found is None:
            return None
        own = 2 if self._stateful else 1
        kept = [p for i, p in enumerate(found.parameters.values()) if i >= own and p.name not in ("rng", "training")]
        return found.replace(parameters=kept)

    def _named_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names[name]: x for name, x in state.items()}


def _parameters(fn: Callable[..., Any]) -> Iterable[str]:
    found = _signature(fn)
    return () if found is None else found.parameters


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:  # of a builtin
        return None


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
        """Return itself: a copied native module has weights of its own, and computes with the same source."""
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

    def recipe(self, reason: str) -> dict[str, Any]:
        """Return what `wrapping.cooked` makes the native module of again, as JSON can hold it; weights are not part.

        Args:
            reason: why the source cannot be saved itself, for the message.

        Raises:
            FactoryError: `wrap` was given no factory, or one that has no name.
        """
        factory = self.options.get("factory")
        if factory is None:
            raise FactoryError.missing(self.name, reason)
        given = {name: self.options.get(name) for name in ("src", "copy", "sparse")}
        return {"factory": reference(factory), **{name: x for name, x in given.items() if x not in (None, "auto")}}

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

    @cached_property
    def shapes(self) -> dict[str, tuple[int | None, ...] | None]:
        """The shapes of the weights and state, by name."""
        source = self.functional
        return {slot.name: source.backend.spec(source.read(slot)).shape for slot in self.slots}

    def split(self, values: Callable[[Slot], Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what is trained, and beside it the state and the weights that are frozen, both by name.

        Args:
            values: of each slot; where it is not given, the source's, as tensors of the destination.

        """
        trained: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        for slot in self.slots:
            (trained if slot.trainable else kept)[slot.name] = (values or self.fetch)(slot)
        return trained, kept

    def weights(self, params: Mapping[str, Tensor], state: Mapping[str, Tensor], seed: Tensor | None) -> Weights:
        """Return what a call computes with, of two mappings that `split` returned, or others like them.

        Where a name is says whether it is trained: a weight that moves from one mapping to the other is frozen or not.

        Raises:
            WeightsError: they lack a weight, have one that the module does not know, or one of another shape.
        """
        self.check({**state, **params})
        if len(params) + len(state) != len(self.slots):
            raise WeightsError.unlike(self.name, [], [f"{name} twice" for name in params.keys() & state.keys()])
        trained: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {}
        for slot in self.slots:  # in their own order: one relay serves all calls
            if slot.name in params and not slot.is_state:
                trained[slot.name] = params[slot.name]
            else:
                kept[slot.name] = state[slot.name] if slot.name in state else params[slot.name]
        return Weights(trained, kept, seed)

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Raise a WeightsError unless there is a value of the right shape for each slot, and nothing else."""
        if values.keys() != self.shapes.keys():
            missing, unknown = (sorted(a.keys() - b.keys()) for a, b in ((self.shapes, values), (values, self.shapes)))
            raise WeightsError.unlike(self.name, missing, unknown)
        for name, shape in self.shapes.items():
            if tuple(values[name].shape) != shape:
                raise WeightsError.misfit(self.name, name, tuple(values[name].shape), shape)

    def __call__(
        self, weights: Weights, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the module's result, and the state that the call has changed; warn of losses, which are dropped.

        Raises:
            MutationError: the module has assigned to a weight. `run` is for destinations that can store it.
        """
        return self.without_losses(self.run(weights, training, args, kwargs), weights)

    def without_losses(self, ran: Ran, weights: Weights) -> tuple[Any, dict[str, Tensor]]:
        """Return the first two parts of what `run` gives; warn of losses.

        Raises:
            MutationError: the module has assigned to a weight.
        """
        result, changed, losses = ran
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

    def keyed(
        self, weights: Weights, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call where random numbers follow from a key that the caller gives, or there are none.

        Raises:
            RandomnessError: there is no seed, or none that would reach it, and the module has drawn random numbers.
        """
        found = self(weights, training, args, kwargs)
        if weights.seed is None and self.functional.draws_unseen(training):
            raise (RandomnessError.unseeded if self.random else RandomnessError.unseedable)(self.name)
        return found

    def seeded(
        self,
        draw: Callable[[], Tensor],
        weights: Weights,
        training: bool,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sparing: bool,
    ) -> Ran:
        """Call with a seed, which is drawn only for a module that draws random numbers in this mode.

        Args:
            draw: makes a seed.
            weights: without a seed.
            training: as in a call.
            args: as in a call.
            kwargs: as in a call.
            sparing: whether to find out by a call whether the module draws, where nobody knows; else a seed is drawn.
        """
        draws = self.functional.draws(training)
        if draws is None and sparing:
            found = self.run(weights._replace(seed=self._any_seed), training, args, kwargs)
            if not self.functional.draws(training):
                return found
            draws = True
        return self.run(weights._replace(seed=None if draws is False else draw()), training, args, kwargs)

    def refuse_recomputation(self, training: bool, function: str) -> None:
        """Refuse random numbers in a function that is run again in the backward, where the seed would be another.

        Args:
            training: as in a call, which has been made.
            function: with what the qualified names of the frames begin that run it; nothing else tells.

        Raises:
            RandomnessError: the module draws some in this mode.
        """
        frame: FrameType | None = sys._getframe() if self.functional.draws(training) else None
        while frame is not None:
            if frame.f_code.co_qualname.startswith(function):
                raise RandomnessError.recomputed(self.name, function.partition(".")[0])
            frame = frame.f_back

    @cached_property
    def _any_seed(self) -> Tensor:
        return self.dest.from_numpy(np.zeros(2, np.uint32))

    @property
    def built(self) -> bool:
        """Whether all slots are there."""
        return self.functional.built

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Give a lazy module the slots that it needs for arguments like these.

        Args:
            args: of a call; a `TensorSpec` may stand for a tensor.
            kwargs: likewise.
        """
        source = self.functional.backend

        def zeros(leaf: Any) -> Any:
            if self.dest.is_tensor(leaf):
                leaf = self.dest.spec(leaf)
            elif isinstance(leaf, ARRAYS):
                leaf = TensorSpec(leaf.shape, leaf.dtype.name)
            if not isinstance(leaf, TensorSpec):
                return leaf
            return source.from_numpy(np.zeros([n or _SIZE for n in leaf.shape or ()], dtype(leaf.dtype)))

        leaves, treedef = flatten((list(args), dict(kwargs)), lambda x: isinstance(x, TensorSpec))
        given, named = unflatten(treedef, list(map(zeros, leaves)))
        source.run(lambda: self.functional.build(given, named))

    def dtype(self, slot: Slot) -> str:
        """Return the name of the dtype of the source's value."""
        return self.functional.backend.dtype_name(self.functional.read(slot))

    def fetch(self, slot: Slot) -> Tensor:
        """Return the source's value as a tensor of the destination with memory of its own."""
        return move(self.functional.read(slot), self.functional.backend, self.dest, own=True)

    def send(self, values: Mapping[str, Tensor]) -> Any:
        """Store the destination's values in the source, bit for bit, and return the source."""
        source = self.functional.backend
        return self.functional.write({name: move(x, self.dest, source, own=True) for name, x in values.items()})


_SIZE = 2  # of an unknown dimension, such as the batch's, when a lazy module is built


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

    def __deepcopy__(self, _: Any) -> ModuleLibrary:
        """Return the library itself, which native modules may refer to."""
        return self

    @abstractmethod
    def functional(self, value: Any) -> Functional | None:
        """Return a module of this library as a function; None if `value` is no such module."""

    @abstractmethod
    def native(self, bridge: Bridge) -> Any:
        """Return a module of this library that holds the weights and computes with the source.

        It may take keyword arguments, which `wrap` hands on, as those of its own modules: `name=` of a Keras layer.
        """


class SharedVariables:
    """The destination's variable for each variable of a source, while both are alive: what is tied stays tied."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[int, tuple[Callable[[], Any], weakref.ref[Any]]] = {}

    def get(self, slot: Slot, make: Callable[[], Any]) -> Any:
        """Return the variable of a slot, made if nobody has it."""
        if slot.holder is None:
            return make()
        holder, variable = self._known.get(id(slot.holder), (_dead, _dead))
        found = variable() if holder() is slot.holder else None
        if found is None:
            found = make()
            self._remember(slot.holder, found)
        return found

    def _remember(self, holder: Any, variable: Any) -> None:
        key = id(holder)

        def forget(_: Any) -> None:
            self._known.pop(key, None)

        try:
            self._known[key] = weakref.ref(holder, forget), weakref.ref(variable)
        except TypeError:  # a class without weak references, such as Flax's: kept while the destination's lives
            self._known[key] = lambda: holder, weakref.ref(variable, forget)


def _dead() -> None:
    return None
