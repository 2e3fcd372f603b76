"""The relay: a pure function of flat tensors that a source owns and a destination calls.

Every derivative that a destination ever needs is again a relay:

    relay(xs)             -> ys                       run by the source
    relay.vjp(xs)         -> ys, back                 and `back` is the relay (xs, y cotangents) -> x cotangents

so a destination that differentiates `back` asks it for its own vjp, and so on for any order. `back` is bound to the
residuals of the evaluation that made it: the user's function runs once, whatever the order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from polybridge.core import forks
from polybridge.core.abstract import SIZES, Abstract, plan
from polybridge.core.backend import Backend, Pullback, Rows, spread
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
        results: Results = self._source.run(lambda: self._evaluator(self._lend(xs)))
        return self._handed_over(results)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Run the program under the source's reverse mode."""
        forks.check(self.call)
        results, pullback = self._source.differentiate(lambda: self._evaluator.vjp(self._lend(xs), wanted))
        if not self.program.told:
            self._tell(pullback)
        if wanted and not results.tensors:
            raise OutputError.no_tensor(self.call, results.structure.rebuild([]))
        outcome = self._handed_over(results)
        positions, outputs_count = tuple(range(len(wanted))), sum(outcome.differentiable)
        slots = tuple(range(outputs_count))
        given = None
        if self._source.narrows():
            given = list(map(self.exchange.dest.dtype_name, map(xs.__getitem__, wanted)))
        taken = None
        if outcome.dtypes is not None:
            taken = [name for name, is_output in zip(outcome.dtypes, outcome.differentiable, strict=True) if is_output]
        back = PullbackRelay(
            self.exchange, self.call, pullback, self._ct_loan, positions, slots, outputs_count, given, taken
        )
        self._loan.until(back)
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

    def _lend(self, xs: Sequence[Tensor | None]) -> list[Tensor]:
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

    def _handed_over(self, results: Results) -> Outcome:
        dtypes = _dtypes(self._source, results.tensors) if self.exchange.dest.narrows() else None
        leaves = _given(self.exchange, results.tensors, self.call, results.structure, self.program)
        return Outcome(leaves, results.structure, results.differentiable, dtypes)

    def _tell(self, pullback: Pullback) -> None:
        """Warn once of trainable state that the program reads without getting it as an input."""
        self.program.told = True
        names = pullback.closed_over(self.program.fn)
        if names:
            warn(DetachedStateWarning.naming(self.call, names))


class PullbackRelay(Relay):
    """The derivative of one evaluation, bound to its residuals.

    Its inputs are primals, which the residuals hold already and which do not move again, and cotangents.

    Args:
        exchange: between the two backends.
        call: how messages name the function.
        pullback: of the evaluation.
        loan: what the pullback has shown of how it treats cotangents.
        results: which of the cotangents that the pullback returns are this relay's leaves; as many as its primals.
        slots: which of the cotangents that the pullback takes are this relay's inputs.
        cotangents: how many cotangents the pullback takes.
        given: the dtypes of the leaves, where the source may have narrowed the primals.
        taken: the dtypes of the cotangents, where the destination may have narrowed the results.
    """

    def __init__(
        self,
        exchange: Exchange,
        call: str,
        pullback: Pullback,
        loan: Loan,
        results: tuple[int, ...],
        slots: tuple[int, ...],
        cotangents: int,
        given: Sequence[str | None] | None = None,
        taken: Sequence[str | None] | None = None,
    ) -> None:
        """Bind the pullback."""
        self.exchange, self.call = exchange, call
        self._pullback, self._loan = pullback, loan
        self._results, self._slots, self._cotangents = results, slots, cotangents
        self._given, self._taken = given, taken

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Pull the cotangents back."""
        return self._pulled(self._pullback, xs)

    def rows(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Pull the cotangents back, with rows where the destination takes them."""
        return self._pulled(self._pullback.rows if self.exchange.sparse else self._pullback, xs)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Pull the cotangents back under the source's reverse mode."""
        forks.check(self.call)
        returned, pullback = self.exchange.source.differentiate(lambda: self._pullback.vjp(self._lent(xs)))
        found, count = list(returned), len(returned)
        del returned  # so that the tensors are held nowhere else
        taken = None
        if self._taken is not None:
            names = _dtypes(self.exchange.source, [found[i] for i in self._results])
            taken = [name for name in names if name is not None]
        outcome = self._outcome(found)
        inputs = (*self._results, *(count + slot for slot in self._slots))  # of the new pullback's results
        slots = tuple(r for r, is_connected in zip(self._results, outcome.differentiable, strict=True) if is_connected)
        results = tuple(inputs[i] for i in wanted)
        given = None
        if self._given is not None:  # of the primals, which a graph leaves out, and of the cotangents
            names = [*self._given, *_dtypes(self.exchange.dest, self._own(xs))]
            given = [names[i] for i in wanted]
        back = PullbackRelay(self.exchange, self.call, pullback, self._loan, results, slots, count, given, taken)
        return outcome, back

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Push forward by the pullback's own means."""
        loan, name = self._loan, "tangent {}".format
        try:
            found = self.exchange.source.differentiate(
                lambda: loan.run(self._pullback.jvp, loan.lend(tangents), self.call, name)
            )
        except NotImplementedError:
            return None
        return _given(self.exchange, list(found), self.call)

    def _pulled(self, pull: Callable[..., Sequence[Tensor | Rows | None]], xs: Sequence[Tensor | None]) -> Outcome:
        forks.check(self.call)
        name = "the cotangent of output {}".format
        found = self.exchange.source.differentiate(lambda: list(self._loan.run(pull, self._lent(xs), self.call, name)))
        return self._outcome(found)  # whose tensors are held nowhere else

    def _lent(self, xs: Sequence[Tensor | None]) -> list[Tensor | None]:
        slots = self._slots
        lent = self._loan.lend(xs[len(xs) - len(slots) :])  # the cotangents come after the primals
        if self._taken is not None:
            lent = [widened(self.exchange.source, x, name) for x, name in zip(lent, self._taken, strict=True)]
        return lent if len(slots) == self._cotangents else spread(lent, slots, self._cotangents)

    def _own(self, xs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the cotangents, which come after the primals."""
        return xs[len(xs) - len(self._slots) :]

    def _outcome(self, found: list[Tensor | None]) -> Outcome:
        leaves = list(map(found.__getitem__, self._results))
        found.clear()
        given = _given(self.exchange, leaves, self.call)
        connected = tuple([x is not None for x in given])
        if self._given is not None:
            given = [widened(self.exchange.dest, x, name) for x, name in zip(given, self._given, strict=True)]
        return Outcome(given, None, connected)


def _dtypes(backend: Backend, tensors: Sequence[Tensor | None]) -> list[str | None]:
    return [None if x is None else backend.dtype_name(x) for x in tensors]


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)


def _given(
    exchange: Exchange,
    tensors: list[Tensor | None],
    call: str,
    structure: Structure | None = None,
    program: Program | None = None,
) -> list[Tensor | None]:
    """Give each tensor to the caller, emptying the list: what is still referenced here cannot be proved to be free."""
    given: list[Tensor | None] = []
    try:
        for i in range(len(tensors)):
            given.append(exchange.give(tensors, i))
    except UnsupportedTensorError as error:
        where = program.result(structure, len(given)) if program and structure else "a gradient"
        raise error.at(call, where) from None
    return given
