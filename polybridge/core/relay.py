"""The relay: a pure function of flat tensors that a source owns and a destination calls.

Every derivative that a destination ever needs is again a relay:

    relay(xs)             -> ys                       run by the source
    relay.vjp(xs)         -> ys, back                 and `back` is the relay (xs, y cotangents) -> x cotangents

so a destination that differentiates `back` asks it for its own vjp, and so on for any order. `back` is bound to the
residuals of the evaluation that made it: the user's function runs once, whatever the order.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from polybridge.core import forks
from polybridge.core.abstract import SIZES, Abstract, plan
from polybridge.core.backend import Backend, Narrowing, Pullback, Rows, spread
from polybridge.core.errors import (
    DetachedStateWarning,
    OutputError,
    PromisedShapeError,
    RandomnessError,
    UnsupportedTensorError,
    note_placeholders,
    remember,
    warn,
)
from polybridge.core.exchange import Exchange, Loan, move, widened
from polybridge.core.programs import Program, Results
from polybridge.core.specs import TensorSpec
from polybridge.core.trees import Structure, flatten

Tensor = Any


@dataclass(slots=True)
class Outcome:
    """What one evaluation returned.

    Attributes:
        leaves: the tensors; None where a cotangent is structurally zero.
        structure: how they form the function's own result; None for a derivative.
        differentiable: for each leaf, whether a cotangent of it is taken by `back`.
        dtypes: of the leaves in the source, where the destination may have narrowed them.
    """

    leaves: list[Tensor | None]
    structure: Structure | None
    differentiable: tuple[bool, ...]
    dtypes: Sequence[str | None] | None = None

    def with_leaves(self, leaves: list[Tensor | None]) -> Outcome:
        """Return the same outcome with other tensors, such as those that a tape follows."""
        return Outcome(leaves, self.structure, self.differentiable, self.dtypes)


class Relay(ABC):
    """A flat function of the destination's tensors. Its name, for messages, is `call`."""

    exchange: Exchange
    call: str

    @abstractmethod
    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Evaluate without a derivative."""

    @abstractmethod
    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Evaluate, keeping the residuals.

        Args:
            xs: the inputs; None stands for a cotangent that is zero.
            wanted: the positions of the inputs whose cotangents are wanted; these are floating or complex.

        Returns:
            The outcome, and the relay `back` whose inputs are the wanted inputs followed by one cotangent for each
            differentiable leaf of the outcome, and whose outcome has one leaf for each wanted input.
        """

    def rows(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Evaluate without a derivative; leaves may be what the destination has for `Rows`."""
        return self(xs)

    def _around(self) -> AbstractContextManager[Any] | None:
        """Return what an evaluation needs around it here, if anything.

        Raises:
            ForkError: it cannot be had in this process.
        """
        forks.check(self.call)
        around = self.exchange.source.around
        return None if around is None else around()

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Return a tangent per differentiable result of the evaluation whose `back` this is, by one per wanted input.

        None, instead of a list, says that the source has no forward mode of its own: see `orders.push`.
        """
        return None


class FunctionRelay(Relay):
    """A program of the source."""

    def __init__(self, program: Program, exchange: Exchange, output_specs: Any = None) -> None:
        """Prepare the relay.

        Args:
            program: what the source runs.
            exchange: between the caller's and the program's backend.
            output_specs: a tree of TensorSpec like the result's, where the user gave one.
        """
        self.program, self.exchange, self.call = program, exchange, program.call
        self._output_specs = output_specs
        if output_specs is not None:
            program.promised = self._given_plan().structure
        self._source = exchange.source
        self._loan = exchange.loan()
        self._ct_loan = exchange.loan()
        lent = partial(self._loan.run, call=program.call, name=program.argument)
        self._evaluator = program.evaluator(lent, self._run_on_copies)
        self.batched: dict[Any, Any] = {}  # by axes; filled by `batching.batched`

    @property
    def told(self) -> bool:
        """Whether the user knows of the trainable state that the program reads without getting it as an input."""
        return self.program.told

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Run the program."""
        forks.check(self.call)
        results: Results = self._source.run(lambda: self._evaluator(self._lent(xs)))
        return self._outcome(results)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Run the program under the source's reverse mode."""
        source, dest, loan = self._source, self.exchange.dest, self._loan
        if not forks.is_safe:
            forks.check(self.call)
        context = None if source.around is None else source.around()
        if context is not None:
            with context:
                return self.vjp(xs, wanted)
        narrowing = source.narrowing
        before = None if narrowing is None else narrowing.latest
        results, pullback = self._evaluator.vjp(self._lent(xs), wanted)
        given = taken = None
        if narrowing is not None and narrowing.latest is not before:
            given = [dest.dtype_name(xs[i]) for i in wanted]
        if not self.program.told:
            self._tell(pullback)
        differentiable = results.differentiable
        if wanted and not differentiable:
            raise OutputError.no_tensor(self.call, results.structure.rebuild([]))
        outcome = self._outcome(results)
        if outcome.dtypes is not None:
            taken = [name for name, is_output in zip(outcome.dtypes, differentiable, strict=True) if is_output]
        wires = _all_of(len(wanted), sum(differentiable))
        back = PullbackRelay(self.exchange, self.call, self._ct_loan, pullback, wires, given, taken)
        if loan.guarding:
            loan.until(back)
        return outcome, back

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation, as the user gave it or by running the program on placeholders.

        Raises:
            PromisedShapeError: the program needs values, which placeholders do not have.
            Exception: whatever the program raises besides, with a note.
        """
        if self._output_specs is not None:
            return self._given_plan()
        try:
            return self.planned(specs, wanted)
        except (PromisedShapeError, RandomnessError):  # of a function of another framework inside this one; of a module
            raise
        except Exception as error:
            remember(error)  # graphs raise it again without its cause
            if self._source.needs_values(error):
                raise PromisedShapeError.unknown(self.call, specs, error) from error
            note_placeholders(error, self.call, specs, () if all(spec.concrete for spec in specs) else SIZES)
            raise

    def planned(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation by running the program on placeholders; raises what the program raises."""
        return plan(lambda concrete: self._evaluator.abstract(concrete, wanted), specs)

    def _given_plan(self) -> Abstract:
        leaves, treedef = flatten(self._output_specs, is_leaf=_is_spec)
        dynamic = tuple(i for i, leaf in enumerate(leaves) if _is_spec(leaf))
        specs = [leaves[i] for i in dynamic]
        rest = [None if _is_spec(leaf) else leaf for leaf in leaves]
        return Abstract(specs, tuple(s.differentiable for s in specs), Structure(treedef, rest, dynamic), None)

    def _lent(self, xs: Sequence[Tensor | None]) -> list[Tensor]:
        try:
            return self._loan.lend(xs)
        except UnsupportedTensorError as error:
            raise self.located(xs, error) from None

    def located(self, xs: Sequence[Tensor | None], error: UnsupportedTensorError) -> UnsupportedTensorError:
        """Find the input that cannot cross and name it."""
        for number, x in enumerate(xs):
            try:
                move(x, self.exchange.dest, self._source, own=False)
            except UnsupportedTensorError as found:
                return found.at(self.call, self.program.argument(number))
        return error.at(self.call, "an argument")

    def _run_on_copies(self, fn: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor]) -> Any:
        copy = self._source.copy
        return fn([copy(x) for x in inputs] if self._source.counts_writes else inputs)

    def _outcome(self, results: Results) -> Outcome:
        exchange, structure, dtypes = self.exchange, results.structure, None
        if exchange.dest.narrowing is not None:
            dtypes = _widths(self._source, results.tensors, exchange.dest.narrowing)
        leaves = exchange.give(results.tensors, self.call, partial(self.program.result, structure))
        return Outcome(leaves, structure, results.differentiable, dtypes)

    def _tell(self, pullback: Pullback) -> None:
        """Warn once of trainable state that the program reads without getting it as an input."""
        self.program.told = True
        names = pullback.closed_over(self.program.fn)
        if names:
            warn(DetachedStateWarning.naming(self.call, names))


class Wires(NamedTuple):
    """How a pullback hangs in a relay.

    Attributes:
        results: which of the cotangents that the pullback returns are the relay's leaves; as many as its primals.
        slots: which of the cotangents that the pullback takes are the relay's inputs.
        taken: how many cotangents the pullback takes.
        whole: whether the leaves are all that the pullback returns, in its order.
    """

    results: Sequence[int]
    slots: Sequence[int]
    taken: int
    whole: bool = False


@functools.cache
def _all_of(primals: int, outputs: int) -> Wires:
    """Return the wires of a function's own pullback."""
    return Wires(range(primals), range(outputs), outputs, whole=True)


class PullbackRelay(Relay):
    """The derivative of one evaluation, bound to its residuals.

    Its inputs are primals, which the residuals hold already and which do not move again, and cotangents.

    Args:
        exchange: between the two backends.
        call: how messages name the function.
        loan: what the pullback has shown of how it treats cotangents.
        pullback: of the evaluation.
        wires: what its cotangents are here.
        given: the dtypes of the leaves, where the source has narrowed a primal.
        taken: the dtypes of the cotangents, where the destination has narrowed a result.
    """

    def __init__(
        self,
        exchange: Exchange,
        call: str,
        loan: Loan,
        pullback: Pullback,
        wires: Wires,
        given: Sequence[str | None] | None = None,
        taken: Sequence[str | None] | None = None,
    ) -> None:
        """Bind the pullback."""
        self.exchange, self.call, self._loan = exchange, call, loan
        self._pullback, self._wires, self._given, self._taken = pullback, wires, given, taken

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Pull the cotangents back."""
        return self._pulled(self._pullback, xs)

    def rows(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Pull the cotangents back, with rows where the destination takes them."""
        return self._pulled(self._pullback.rows if self.exchange.sparse else self._pullback, xs)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Pull the cotangents back under the source's reverse mode."""
        context = self._around()
        if context is not None:
            with context:
                return self.vjp(xs, wanted)
        source, dest = self.exchange.source, self.exchange.dest
        results, slots = self._wires.results, self._wires.slots
        returned, pullback = self._pullback.vjp(self._lent(xs))
        found, count = list(returned), len(returned)
        del returned  # so that the tensors are held nowhere else
        taken = given = None
        if dest.narrowing is not None:
            names = _widths(source, [found[i] for i in results], dest.narrowing)
            taken = names and [name for name in names if name is not None]
        if source.narrowing is not None:
            names = _widths(dest, xs[len(xs) - len(slots) :], source.narrowing)  # of the cotangents
            if self._given is not None or names is not None:  # of the primals, which a graph leaves out
                names = [*(self._given or [None] * len(results)), *(names or [None] * len(slots))]
                given = [names[i] for i in wanted]
        outcome = self._outcome(found)
        inputs = (*results, *(count + slot for slot in slots))  # of the new pullback's results
        connected = tuple(r for r, is_connected in zip(results, outcome.differentiable, strict=True) if is_connected)
        wires = Wires(tuple(inputs[i] for i in wanted), connected, count)
        return outcome, PullbackRelay(self.exchange, self.call, self._loan, pullback, wires, given, taken)

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Push forward by the pullback's own means."""
        context = self._around()
        if context is not None:
            with context:
                return self.push(tangents)
        try:
            found = list(self._loan.run(self._pullback.jvp, self._loan.lend(tangents), self.call, _tangent))
        except NotImplementedError:
            return None
        return self.exchange.give(found, self.call, _gradient)

    def _pulled(self, pull: Callable[..., Sequence[Tensor | Rows | None]], xs: Sequence[Tensor | None]) -> Outcome:
        if not forks.is_safe:
            forks.check(self.call)
        around = self.exchange.source.around
        context = None if around is None else around()
        if context is not None:
            with context:
                return self._pulled(pull, xs)
        loan = self._loan  # Nothing else gets a name: the list shall be all that holds what is returned.
        if loan.watching:
            return self._outcome(list(loan.run(pull, self._lent(xs), self.call, _cotangent)))
        return self._outcome(list(pull(self._lent(xs))))

    def _lent(self, xs: Sequence[Tensor | None]) -> list[Tensor | None]:
        wires = self._wires
        lent = self._loan.lend(xs[len(xs) - len(wires.slots) :])  # the cotangents come after the primals
        if self._taken is not None:
            lent = [widened(self.exchange.source, x, name) for x, name in zip(lent, self._taken, strict=True)]
        return lent if len(lent) == wires.taken else spread(lent, wires.slots, wires.taken)

    def _outcome(self, found: list[Tensor | None]) -> Outcome:
        """Give the leaves of what the pullback has returned; the list holds all of it."""
        if not self._wires.whole:
            found[:] = [found[i] for i in self._wires.results]
        leaves = self.exchange.give(found, self.call, _gradient)
        if self._given is not None:
            leaves = [widened(self.exchange.dest, x, name) for x, name in zip(leaves, self._given, strict=True)]
        return Outcome(leaves, None, tuple([x is not None for x in leaves]))


def _gradient(_: int) -> str:
    return "a gradient"


_cotangent, _tangent = "the cotangent of output {}".format, "tangent {}".format


def _widths(backend: Backend, tensors: Sequence[Tensor | None], narrowing: Narrowing) -> list[str | None] | None:
    """Return the dtypes of a backend's tensors, None if they are all the same where they arrive."""
    narrow = narrowing.dtypes()
    if not narrow:
        return None
    names = [None if x is None else backend.dtype_name(x) for x in tensors]
    return None if narrow.isdisjoint(names) else names


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)
