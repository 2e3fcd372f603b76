"""The batched form of a relay: by the source's own vectorisation, or example by example."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from polybridge.core.abstract import Abstract
from polybridge.core.errors import LoopWarning, NotDifferentiableError, PolybridgeError, UnsupportedTensorError, warn
from polybridge.core.exchange import Exchange
from polybridge.core.programs import Program, Results
from polybridge.core.relay import FunctionRelay, Outcome, Relay
from polybridge.core.specs import TensorSpec

Tensor = Any
T = TypeVar("T")
Axes = tuple[int | None, ...]
"""For each tensor the axis along which the examples lie, None for a tensor that they share."""


def batched(relay: FunctionRelay | BatchedRelay, axes: Axes) -> BatchedRelay:
    """Return the relay of a batch of evaluations, with the examples of every result along axis 0; made once."""
    found = relay.batched.get(axes)
    if found is None:
        found = relay.batched.setdefault(axes, BatchedRelay(relay, axes))
    return found


class Vectorised(Program):
    """A program over a batch, vectorised by its source.

    Args:
        inner: the program of one example.
        axes: of its inputs.
    """

    def __init__(self, inner: Program, axes: Axes) -> None:
        """Keep the parts."""
        self.fn, self.call, self.source, self.vectorises = inner.fn, inner.call, inner.source, inner.vectorises
        self._inner = inner
        self._mapped = self.source.vmap(self._example, axes)
        # Without tensors, by specs of inputs; never forgotten: what the source has traced it does not trace again.
        self._known: dict[tuple[TensorSpec, ...], Results] = {}
        self._thread = threading.local()

    @property
    def told(self) -> bool:
        """Whether somebody has looked for state, in the program of one example or of a batch."""
        return self._inner.told

    @told.setter
    def told(self, told: bool) -> None:
        self._inner.told = told

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Run the program."""
        self._thread.found = None
        tensors = list(self._mapped(*inputs))
        specs = tuple(map(self.source.spec, inputs))
        found = self._thread.found or self._known[specs]
        self._thread.found = None
        self._known.setdefault(specs, found)
        return Results(tensors, found.differentiable, found.structure)

    def _example(self, *tensors: Tensor) -> Sequence[Tensor]:
        results = self._inner(tensors)
        self._thread.found = Results([], results.differentiable, results.structure)
        return results.tensors

    def argument(self, number: int) -> str:
        """Return where an input is among the arguments."""
        return self._inner.argument(number)


class BatchedRelay(Relay):
    """A relay over a batch: vectorised until the source shows that it cannot, in a loop from then on."""

    def __init__(self, inner: FunctionRelay | BatchedRelay, axes: Axes) -> None:
        """Prepare both forms.

        Args:
            inner: the relay of one example.
            axes: of its inputs.
        """
        self.exchange, self.call = inner.exchange, inner.call
        self.program: Program = Vectorised(inner.program, axes)
        self.batched: dict[Axes, BatchedRelay] = {}
        self._inner, self._axes = inner, axes
        self._vectorised = FunctionRelay(self.program, inner.exchange)
        self._loops: bool | None = None  # not known yet

    @property
    def told(self) -> bool:
        """Whether the user knows of the trainable state that the program reads without getting it as an input."""
        return self.program.told

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Evaluate."""
        return self._evaluate(lambda relay: relay(xs), xs)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Evaluate, keeping the residuals."""
        return self._evaluate(lambda relay: relay.vjp(xs, wanted), xs)

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation, from that of one example."""
        size = next(spec.shape[a] for spec, a in zip(specs, self._axes, strict=True) if a is not None and spec.shape)
        one = self._inner.abstract([s.without(a) for s, a in zip(specs, self._axes, strict=True)], wanted)
        return replace(one, specs=[spec.with_first(size) for spec in one.specs])

    def located(self, xs: Sequence[Tensor | None], error: UnsupportedTensorError) -> UnsupportedTensorError:
        """Find the input that cannot cross and name it."""
        return self._vectorised.located(xs, error)

    def _evaluate(self, evaluate: Callable[[Relay], T], xs: Sequence[Tensor | None]) -> T:
        warning = self._refusal(xs) if self._loops is None else None
        if not self._loops and warning is None:
            self._loops = False
            try:
                return evaluate(self._vectorised)
            except PolybridgeError:
                raise
            except Exception as error:  # the source's; if it is the user's own, the loop raises it again
                warning = LoopWarning.because(self.call, error)  # the error itself would hold this frame
        result = evaluate(Looped(self.exchange, self.call, self._inner, self._axes))
        if not self._loops:
            self._loops = True
            if warning is not None and self._inner_vectorises():
                warn(warning)
        return result

    def _refusal(self, xs: Sequence[Tensor | None]) -> LoopWarning | None:
        """Return why the function cannot be vectorised, found on placeholders: a run that fails may move state."""
        if not self.program.vectorises:
            return LoopWarning.because(self.call, NotImplementedError("its derivative is a rule for one example"))
        try:
            self._vectorised.planned([self.exchange.dest.spec(x) for x in xs], ())
        except Exception as error:
            return LoopWarning.because(self.call, error)
        return None

    def _inner_vectorises(self) -> bool:
        return not (isinstance(self._inner, BatchedRelay) and self._inner._loops)


class Looped(Relay):
    """A batch of evaluations, one by one.

    Args:
        exchange: between the two backends.
        call: how messages name the function.
        relays: one for all examples, or one for each.
        axes: of the inputs.
        places: for each leaf the axis along which the examples are stacked, None for one that is their sum; all are
            stacked along axis 0 where this is not given.
    """

    def __init__(
        self,
        exchange: Exchange,
        call: str,
        relays: Relay | Sequence[Relay],
        axes: Sequence[int | None],
        places: Sequence[int | None] | None = None,
    ) -> None:
        """Keep the relays."""
        self.exchange, self.call = exchange, call
        self._relays, self._axes, self._places = relays, axes, places

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Evaluate each example."""
        outcomes = [relay(row) for relay, row in self._rows(xs)]
        return self._joined(outcomes)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Evaluate each example, keeping its residuals."""
        found = [relay.vjp(row, wanted) for relay, row in self._rows(xs)]
        outcome = self._joined([outcome for outcome, _ in found])
        if any(of_one.differentiable != outcome.differentiable for of_one, _ in found):
            raise NotDifferentiableError.uneven(self.call)
        places = self._places or (0,) * len(outcome.leaves)
        axes = [place for place, taken in zip(places, outcome.differentiable, strict=True) if taken]
        places = [self._axes[i] for i in wanted]
        return outcome, Looped(self.exchange, self.call, [back for _, back in found], [*places, *axes], places)

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Push each example forward, if the source has a forward mode of its own."""
        count = len(tangents)
        rows = []
        for relay, row in self._rows([*tangents, *[None] * (len(self._axes) - count)]):
            found = relay.push(row[:count])
            if found is None:
                return None
            rows.append(found)
        places = self._axes[count:]
        return [self._join(column, place) for column, place in zip(zip(*rows, strict=True), places, strict=True)]

    def _rows(self, xs: Sequence[Tensor | None]) -> list[tuple[Relay, list[Tensor | None]]]:
        dest = self.exchange.dest
        mapped = {i: axis for i, axis in enumerate(self._axes) if axis is not None and xs[i] is not None}
        relays = self._relays
        if isinstance(relays, Relay):
            position, axis = next(iter(mapped.items()))
            relays = [relays] * dest.spec(xs[position]).shape[axis]  # type: ignore[index, operator]
        return [
            (relay, [dest.select(x, mapped[i], number) if i in mapped else x for i, x in enumerate(xs)])
            for number, relay in enumerate(relays)
        ]

    def _joined(self, outcomes: Sequence[Outcome]) -> Outcome:
        if not outcomes:
            raise UnsupportedTensorError("a batch of no examples").at(self.call, "an argument")
        columns = list(zip(*(outcome.leaves for outcome in outcomes), strict=True))
        places = self._places or (0,) * len(columns)
        leaves = [self._join(column, place) for column, place in zip(columns, places, strict=True)]
        connected = tuple(map(any, zip(*(outcome.differentiable for outcome in outcomes), strict=True)))
        return Outcome(leaves, outcomes[0].structure, connected, outcomes[0].dtypes)

    def _join(self, column: Sequence[Tensor | None], place: int | None) -> Tensor | None:
        dest = self.exchange.dest
        present = [x for x in column if x is not None]
        if not present:
            return None
        if len(present) < len(column):
            zeros = dest.from_numpy(np.zeros_like(dest.to_numpy(present[0])))
            present = [zeros if x is None else x for x in column]
        return dest.total(present) if place is None else dest.stack(present, place)


class Chosen(Relay):
    """A batch whose examples belong to several evaluations of a whole batch; an example of none has zeros.

    Args:
        relays: of the evaluations.
        rows: for each of them which examples are its own, over the leading axes of every tensor.
    """

    def __init__(self, relays: Sequence[Relay], rows: Sequence[np.ndarray[Any, Any]], exchange: Exchange) -> None:
        """Keep the relays."""
        self.exchange, self.call = exchange, relays[0].call
        self._relays, self._rows = relays, rows

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Evaluate the batch in each, and take its own examples."""
        return self._joined([relay(xs) for relay in self._relays])

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Do so keeping the residuals."""
        found = [relay.vjp(xs, wanted) for relay in self._relays]
        outcome = self._joined([outcome for outcome, _ in found])
        if any(of_one.differentiable != outcome.differentiable for of_one, _ in found):
            raise NotDifferentiableError.uneven(self.call)
        return outcome, Chosen([back for _, back in found], self._rows, self.exchange)

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Push the batch forward in each, if the source has a forward mode of its own."""
        found = []
        for relay in self._relays:
            pushed = relay.push(tangents)
            if pushed is None:
                return None
            found.append(pushed)
        return list(map(self._join, zip(*found, strict=True)))

    def _joined(self, outcomes: Sequence[Outcome]) -> Outcome:
        leaves = list(map(self._join, zip(*(outcome.leaves for outcome in outcomes), strict=True)))
        connected = tuple(map(any, zip(*(outcome.differentiable for outcome in outcomes), strict=True)))
        return Outcome(leaves, outcomes[0].structure, connected, outcomes[0].dtypes)

    def _join(self, column: Sequence[Tensor | None]) -> Tensor | None:
        dest = self.exchange.dest
        present = [(dest.to_numpy(x), rows) for x, rows in zip(column, self._rows, strict=True) if x is not None]
        if not present:
            return None
        joined = np.zeros_like(present[0][0])
        for x, rows in present:
            joined[rows] = x[rows]
        return dest.from_numpy(joined)
