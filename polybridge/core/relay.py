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
from typing import Any

from polybridge.core import forks
from polybridge.core.abstract import Abstract, Evaluation, plan
from polybridge.core.backend import Pullback, pullback_of, spread
from polybridge.core.errors import (
    DetachedStateWarning,
    OutputError,
    PromisedShapeError,
    UnsupportedTensorError,
    remember,
    warn,
)
from polybridge.core.exchange import Exchange, Loan, array_to
from polybridge.core.specs import TensorSpec
from polybridge.core.trees import Classify, Kind, Structure, flatten, path, separate

Tensor = Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one evaluation returned.

    Attributes:
        leaves: the tensors; None where a cotangent is structurally zero.
        structure: how they form the function's own result; None for a derivative.
        differentiable: for each leaf, whether a cotangent of it is taken by `back`.
    """

    leaves: list[Tensor | None]
    structure: Structure | None
    differentiable: tuple[bool, ...]

    def with_leaves(self, leaves: list[Tensor | None]) -> Outcome:
        """Return the same outcome with other tensors, such as those that a tape follows."""
        return Outcome(leaves, self.structure, self.differentiable)


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


class FunctionRelay(Relay):
    """The user's function, for arguments of one structure."""

    def __init__(
        self,
        fn: Callable[..., Any],
        call: str,
        exchange: Exchange,
        structure: Structure,
        classify: Classify,
        output_specs: Any = None,
    ) -> None:
        """Prepare the relay.

        Args:
            fn: the user's function.
            call: how messages name it.
            exchange: between the caller's and the function's backend.
            structure: of `(args, kwargs)`.
            classify: says what a leaf of the result is to the source.
            output_specs: a tree of TensorSpec like the result's, where the user gave one.
        """
        self.fn, self.call, self.exchange = fn, call, exchange
        self._structure, self._classify, self._output_specs = structure, classify, output_specs
        self._source = exchange.source
        self._loan = exchange.loan()
        self._ct_loan = exchange.loan()
        self.told = False

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Run the function."""
        forks.check(self.call)
        results: _Results = self._source.run(lambda: self._run_on_loan(self._lend(xs)))
        return results.give(self.exchange, self.call)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Run the function under the source's reverse mode."""
        forks.check(self.call)
        lent = self._lend(xs)
        results, pullback = self._evaluate(lent, wanted, self._run_on_loan)
        if not self.told:
            self._tell(pullback)
        if wanted and not results.tensors:
            raise OutputError.no_tensor(self.call, results.structure.rebuild([]))
        outcome = results.give(self.exchange, self.call)
        positions, outputs_count = tuple(range(len(wanted))), sum(outcome.differentiable)
        slots = tuple(range(outputs_count))
        back = PullbackRelay(self.exchange, self.call, pullback, self._ct_loan, positions, slots, outputs_count)
        self._loan.until(back)
        return outcome, back

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation, as the user gave it or by running the function on placeholders.

        Raises:
            PromisedShapeError: the function cannot run on placeholders.
        """
        if self._output_specs is not None:
            return self._given_plan()
        try:
            return plan(lambda concrete: self._evaluate_abstractly(concrete, wanted), specs)
        except PromisedShapeError:  # of a function of another framework inside this one
            raise
        except Exception as error:
            remember(error)  # graphs raise it again without its cause
            raise PromisedShapeError.unknown(self.call, specs, error) from error

    def _evaluate_abstractly(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        placeholders, running = self._source.placeholders(specs)
        with running():
            if not self._source.differentiating():
                results = self._run_on_copies(placeholders)
                found = [self._source.spec(x) for x in results.tensors]
                return Abstract(found, results.differentiable, results.structure, None)
            results, pullback = self._evaluate(placeholders, wanted, self._run_on_copies)
            found = [self._source.spec(x) for x in results.tensors]
        outputs: list[Tensor | None] = list(results.take_outputs())
        evaluation = Evaluation(pullback, outputs, tuple(range(len(wanted))), running)
        return Abstract(found, results.differentiable, results.structure, evaluation)

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
                self.exchange.dest.dense(x)
            except UnsupportedTensorError as found:
                return found.at(self.call, self._structure.argument(number))
        return error.at(self.call, "an argument")

    def _evaluate(
        self, inputs: Sequence[Tensor], wanted: Sequence[int], run: Callable[[Sequence[Tensor]], _Results]
    ) -> tuple[_Results, Pullback]:
        """Evaluate under the source's vjp with the wanted inputs as primals and the others held fixed."""
        first: _Results | None = None

        def primal(*primals: Tensor) -> list[Tensor]:
            merged = list(inputs)
            for position, value in zip(wanted, primals, strict=True):
                merged[position] = value
            nonlocal first
            results = run(merged)
            if first is None:  # a source may run the function again for a second derivative
                first = results
            return results.take_outputs()

        outputs, pullback = pullback_of(self._source, primal, [inputs[i] for i in wanted])
        assert first is not None
        first.put_outputs(outputs)
        return first, pullback

    def _run_on_loan(self, inputs: Sequence[Tensor]) -> _Results:
        results: _Results = self._loan.run(self._run, inputs, self.call, self._structure.argument)
        return results

    def _run_on_copies(self, inputs: Sequence[Tensor]) -> _Results:
        copy = self._source.copy
        return self._run([copy(x) for x in inputs] if self._source.counts_writes else inputs)

    def _run(self, inputs: Sequence[Tensor]) -> _Results:
        args, kwargs = self._structure.rebuild(inputs)
        tensors, structure = separate(self.fn(*args, **kwargs), self._classify, self._converted)
        try:
            differentiable = tuple(map(self._source.is_differentiable, tensors))
        except UnsupportedTensorError:
            raise self._unsupported(tensors, structure) from None
        return _Results(tensors, differentiable, structure)

    def _converted(self, kind: Kind, leaf: Any, treedef: Any, position: int) -> Tensor:
        where = path(treedef, position, "result")
        if kind is Kind.FOREIGN:
            raise OutputError.foreign(self.call, where, type(leaf), self._source.name)
        if kind is Kind.COMPOSITE:
            raise UnsupportedTensorError(f"a {type(leaf).__name__} is not a dense tensor").at(self.call, where)
        return array_to(self._source, leaf, self.call, where)

    def _unsupported(self, tensors: list[Tensor], structure: Structure) -> UnsupportedTensorError:
        for number, tensor in enumerate(tensors):
            try:
                self._source.is_differentiable(tensor)
            except UnsupportedTensorError as error:
                return error.at(self.call, structure.result(number))
        raise AssertionError("a tensor that was refused is accepted now")

    def _tell(self, pullback: Pullback) -> None:
        """Warn once of trainable state that the function reads without getting it as an input."""
        self.told = True
        names = pullback.closed_over(self.fn)
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
    ) -> None:
        """Bind the pullback."""
        self.exchange, self.call = exchange, call
        self._pullback, self._loan = pullback, loan
        self._results, self._slots, self._cotangents = results, slots, cotangents

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        """Pull the cotangents back."""
        forks.check(self.call)
        name = "the cotangent of output {}".format
        return self._outcome(list(self._loan.run(self._pullback, self._lent(xs), self.call, name)))  # held nowhere else

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        """Pull the cotangents back under the source's reverse mode."""
        forks.check(self.call)
        given, pullback = self._pullback.vjp(self._lent(xs))
        found, count = list(given), len(given)
        del given  # so that the tensors are held nowhere else
        outcome = self._outcome(found)
        inputs = (*self._results, *(count + slot for slot in self._slots))  # of the new pullback's results
        slots = tuple(r for r, is_connected in zip(self._results, outcome.differentiable, strict=True) if is_connected)
        results = tuple(inputs[i] for i in wanted)
        return outcome, PullbackRelay(self.exchange, self.call, pullback, self._loan, results, slots, count)

    def _lent(self, xs: Sequence[Tensor | None]) -> list[Tensor | None]:
        return spread(self._loan.lend(xs[len(xs) - len(self._slots) :]), self._slots, self._cotangents)

    def _outcome(self, found: list[Tensor | None]) -> Outcome:
        leaves = [found[i] for i in self._results]
        found.clear()
        connected = tuple(x is not None for x in leaves)
        return Outcome(_given(self.exchange, leaves, self.call), None, connected)


@dataclass(slots=True)
class _Results:
    """What the user's function returned: its tensors, which of them are differentiable, and the tree around them."""

    tensors: list[Tensor | None]
    differentiable: tuple[bool, ...]
    structure: Structure

    def take_outputs(self) -> list[Tensor]:
        """Return the differentiable tensors, so that nothing here keeps them alive."""
        outputs = []
        for i, is_output in enumerate(self.differentiable):
            if is_output:
                outputs.append(self.tensors[i])
                self.tensors[i] = None
        return outputs

    def put_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Put differentiable tensors back where they were taken from."""
        following = iter(outputs)
        for i, is_output in enumerate(self.differentiable):
            if is_output:
                self.tensors[i] = next(following)

    def give(self, exchange: Exchange, call: str) -> Outcome:
        """Hand the tensors over to the caller."""
        return Outcome(_given(exchange, self.tensors, call, self.structure), self.structure, self.differentiable)


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)


def _given(
    exchange: Exchange, tensors: list[Tensor | None], call: str, structure: Structure | None = None
) -> list[Tensor | None]:
    """Give each tensor to the caller, emptying the list: what is still referenced here cannot be proved to be free."""
    given: list[Tensor | None] = []
    for i in range(len(tensors)):
        try:
            given.append(None if tensors[i] is None else exchange.give(exchange.release(tensors, i)))
        except UnsupportedTensorError as error:
            raise error.at(call, "a gradient" if structure is None else structure.result(i)) from None
    return given
