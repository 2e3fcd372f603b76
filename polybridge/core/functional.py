"""A module with weights and state, as a pure function of both."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polybridge.core.backend import Backend
from polybridge.core.errors import note_randomness

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

    def call(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, ...]:
        """Run, and add to what the module raises of random numbers where these come from."""
        try:
            return self.run(*args, _weights=_weights, _training=_training, **kwargs)
        except Exception as error:
            note_randomness(error)
            raise

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
        return signature_of(self.module)

    def promising(self, specs: Any) -> tuple[Callable[..., Any], Any]:
        """Return `call` with all of the state as what has changed, and the specs of all that it then returns.

        Args:
            specs: of the module's result.
        """
        state = {slot.name: self.backend.spec(self.read(slot)) for slot in self.slots if slot.is_state}

        def run(*args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
            result, changed, *_ = self.call(*args, _weights=_weights, _training=_training, **kwargs)
            return result, {name: changed.get(name, _weights.state[name]) for name in state}

        run.__self__ = self  # type: ignore[attr-defined]  # what holds the variables; see `closures`
        return run, (specs, state)

    def held(self) -> Iterator[Any]:
        """Yield the source's variables."""
        return (slot.holder for slot in self.slots)

    def parts(self) -> tuple[Any, ...]:
        """Return what `wrap` takes first, as a tuple: the module, or a function with its params and state."""
        return (self.module,)


def place(path: str) -> str:
    """Return what the user of a module calls a path among the arguments, or in the result, of `Functional.run`."""
    for pattern, replacement in _PLACES.items():
        path = re.sub(pattern, replacement, path)
    return path


_PLACES = {
    r"^kwargs\['_weights'\]\.params\[(.*)\]$": r"the weight \1",
    r"^kwargs\['_weights'\]\.state\[(.*)\]$": r"the state \1",
    r"^kwargs\['_weights'\]\.seed$": "the seed",
    r"^result\[1\]\[(.*)\]$": r"the state \1",
    r"^result\[2\]": "losses",
    r"^result\[0\]": "result",
}


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None where nobody knows it, as of a builtin."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return None
