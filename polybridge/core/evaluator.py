"""How a source evaluates one program again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polybridge.core.abstract import Abstract, Evaluation
from polybridge.core.backend import Backend, Pullback, pullback_of
from polybridge.core.programs import Results
from polybridge.core.specs import TensorSpec

Tensor = Any
Run = Callable[[Sequence[Tensor]], Results]


class Evaluator:
    """Runs a program, and differentiates it by `Backend.vjp`.

    A source that compiles its functions has one of its own, which keeps what it has compiled.

    Args:
        source: the backend.
        run: the program.
        run_on_copies: the program, for placeholders; it may write to them.
    """

    def __init__(self, source: Backend, run: Run, run_on_copies: Run) -> None:
        """Keep the program."""
        self._source, self._run, self._run_on_copies = source, run, run_on_copies

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Run the program."""
        return self._run(inputs)

    def vjp(self, inputs: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Results, Pullback]:
        """Run the program and return the pullback from its differentiable results to the wanted inputs."""
        return self._vjp(inputs, wanted, self._run)

    def vjp_on_copies(self, placeholders: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Results, Pullback]:
        """Do the same with placeholders."""
        return self._vjp(placeholders, wanted, self._run_on_copies)

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation at inputs of these specs, which have no unknown dimensions."""
        placeholders, running = self._source.placeholders(specs)
        with running():
            if not self._source.differentiating():
                return self.plan(self._run_on_copies(placeholders))
            results, pullback = self.vjp_on_copies(placeholders, wanted)
            plan = self.plan(results)
        plan.evaluation = Evaluation(pullback, list(results.take_outputs()), tuple(range(len(wanted))), running)
        return plan

    def plan(self, results: Results) -> Abstract:
        """Return the plan that a run on placeholders gives, of which no derivative is known."""
        specs = [self._source.spec(x) for x in results.tensors]
        return Abstract(specs, results.differentiable, results.structure, None)

    def _vjp(self, inputs: Sequence[Tensor], wanted: Sequence[int], run: Run) -> tuple[Results, Pullback]:
        """Evaluate under the source's vjp with the wanted inputs as primals and the others held fixed."""
        first: Results | None = None

        def primal(*primals: Tensor) -> list[Tensor]:
            merged = list(inputs)
            for position, value in zip(wanted, primals, strict=True):
                merged[position] = value
            nonlocal first
            results = run(merged)
            if first is None:  # a source may run the program again for a second derivative
                first = results
            return results.take_outputs()

        outputs, pullback = pullback_of(self._source, primal, [inputs[i] for i in wanted])
        assert first is not None
        first.put_outputs(outputs)
        return first, pullback
