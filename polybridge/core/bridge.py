"""A module of a source as a destination uses it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any

import numpy as np

from polybridge.core.backend import Backend
from polybridge.core.errors import (
    DetachedStateWarning,
    FactoryError,
    MutationError,
    RandomnessError,
    UnsupportedTensorError,
    WeightsError,
    warn,
)
from polybridge.core.exchange import move
from polybridge.core.factories import reference
from polybridge.core.functional import Functional, Ran, Slot, Weights
from polybridge.core.specs import TensorSpec, dtype
from polybridge.core.trees import ARRAYS, flatten, unflatten

Tensor = Any


class Bridge:
    """A module of a source as a destination uses it.

    Copying it copies nothing, since the source's weights are not what anybody computes with. Pickling it pickles the
    source, or the name of the factory that makes one.

    Args:
        functional: the module.
        dest: the destination's backend.
        function: `functional.call` as a native function of the destination.
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
            found = getattr(values[name], "shape", None)  # of no tensor, such as None
            if found is None or tuple(found) != shape:
                raise WeightsError.misfit(self.name, name, found and tuple(found), shape)

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
        return self._moved(slot.name, self.functional.read(slot), self.functional.backend, self.dest)

    def send(self, values: Mapping[str, Tensor]) -> Any:
        """Store the destination's values in the source, bit for bit, and return the source."""
        source = self.functional.backend
        return self.functional.write({name: self._moved(name, x, self.dest, source) for name, x in values.items()})

    def _moved(self, name: str, value: Tensor, origin: Backend, target: Backend) -> Tensor:
        """Return a value with memory of its own.

        Raises:
            UnsupportedTensorError: it cannot cross.
        """
        try:
            return move(value, origin, target, own=True)
        except UnsupportedTensorError as error:
            raise error.at(self.name, f"the weight or state {name!r}") from None


_SIZE = 2  # of an unknown dimension, such as the batch's, when a lazy module is built
