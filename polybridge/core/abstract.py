"""What is known of an evaluation before it runs: the specs of its results and what they depend on.

Graphs need this when they are traced. Dimensions that are not known are found by evaluating at two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from polybridge.core.backend import Context, Pullback, Rows
from polybridge.core.errors import NotDifferentiableError
from polybridge.core.specs import TensorSpec
from polybridge.core.trees import Structure

Tensor = Any

_RANKS = range(6)  # of an input whose rank is not known
SIZES = (16, 24)  # for an unknown dimension: even, distinct, and large enough for a small convolution kernel


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on placeholders, which can be differentiated on placeholders.

    Args:
        pullback: of the evaluation.
        outputs: its results; None where there is none.
        inputs: which of the cotangents that the pullback returns belong to inputs of the relay.
        running: the context of everything that runs on placeholders.
    """

    pullback: Pullback
    outputs: list[Tensor | None]
    inputs: tuple[int, ...]
    running: Context

    def cotangents(self) -> list[Tensor | Rows | None]:
        """Return a cotangent for each input; None where there is no derivative with respect to it."""
        with self.running():
            found = self.pullback.rows(self.outputs)
        return [found[i] for i in self.inputs]

    def back(self) -> Evaluation:
        """Return the evaluation of the pullback at the outputs themselves as cotangents."""
        with self.running():
            found, pullback = self.pullback.vjp(self.outputs)
        taken = (len(found) + i for i, y in enumerate(self.outputs) if y is not None)
        outputs = [x if i in self.inputs else None for i, x in enumerate(found)]
        return Evaluation(pullback, outputs, (*self.inputs, *taken), self.running)


@dataclass
class Abstract:
    """The plan of an evaluation.

    Attributes:
        specs: of the leaves of the outcome.
        differentiable: for each leaf, whether a cotangent of it is taken.
        structure: how the leaves form the function's own result.
        evaluation: on placeholders, or None where the plan was given and not found.
        draws: whether an evaluation may draw from the generators that `Backend.randomness` captures.
    """

    specs: list[TensorSpec]
    differentiable: tuple[bool, ...]
    structure: Structure | None
    evaluation: Evaluation | None = field(repr=False)
    draws: bool = True

    @property
    def connected(self) -> tuple[bool, ...] | None:
        """For each wanted input whether a derivative with respect to it exists; None if nobody can tell."""
        return None if self._cotangents is None else tuple(x is not None for x in self._cotangents)

    @property
    def rows(self) -> tuple[bool, ...] | None:
        """For each wanted input whether its cotangent is `Rows`; None if nobody can tell."""
        return None if self._cotangents is None else tuple(isinstance(x, Rows) for x in self._cotangents)

    @cached_property
    def _cotangents(self) -> list[Tensor | Rows | None] | None:
        try:
            return None if self.evaluation is None else self.evaluation.cotangents()
        except NotDifferentiableError:
            raise
        except Exception:  # of what only placeholders cannot do; what the real ones cannot do either comes again
            return None

    def back(self, wanted: Sequence[TensorSpec]) -> Abstract:
        """Return the plan of the derivative, whose leaves are the cotangents of the connected ones of the inputs."""
        connected = self.connected or (True,) * len(wanted)
        specs = [spec for spec, is_connected in zip(wanted, connected, strict=True) if is_connected]
        evaluation = None if self.evaluation is None else self.evaluation.back()
        return Abstract(specs, (True,) * len(specs), None, evaluation)


def plan(evaluate: Callable[[Sequence[TensorSpec]], Abstract], specs: Sequence[TensorSpec]) -> Abstract:
    """Return the plan for inputs of `specs`, in which dimensions or ranks may be unknown."""
    if any(spec.shape is None for spec in specs):
        return _plan_of_unknown_rank(evaluate, specs)
    if all(spec.concrete for spec in specs):
        return evaluate(specs)
    small, large = [evaluate([spec.with_unknown(size) for spec in specs]) for size in SIZES]
    merged = [a.merge(b) for a, b in zip(small.specs, large.specs, strict=True)]
    return replace(small, specs=merged)


def _plan_of_unknown_rank(
    evaluate: Callable[[Sequence[TensorSpec]], Abstract], specs: Sequence[TensorSpec]
) -> Abstract:
    """Return the plan at the lowest rank that the function takes, which promises dtypes and no shapes."""
    failure: Exception | None = None
    for rank in _RANKS:
        guess = [TensorSpec((None,) * rank, s.dtype) if s.shape is None else s for s in specs]
        try:
            found = evaluate([spec.with_unknown(SIZES[0]) for spec in guess])
        except Exception as error:  # the function's own, at a rank that it does not take
            failure = error
        else:
            return replace(found, specs=[TensorSpec(None, spec.dtype) for spec in found.specs])
    assert failure is not None
    raise failure
