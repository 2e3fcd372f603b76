"""One evaluation whose derivative was asked for by name, in trees, and the flat relay that is its way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from polybridge.backends.numpy import convert
from polybridge.backends.numpy.convert import Array
from polybridge.core import orders, trees
from polybridge.core.backend import spread
from polybridge.core.errors import CotangentError, NotDifferentiableError, OutputError
from polybridge.core.relay import Outcome, Relay
from polybridge.core.specs import COMPLEX, DIFFERENTIABLE, TensorSpec, dtype
from polybridge.core.trees import Kind, Structure

Function = Callable[..., Any]

_PYTHONS = (int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Argument:
    """An argument that is differentiated.

    Args:
        arrays: its leaves.
        structure: the tree around them.
        start: the number of the first leaf in the flat call.
    """

    arrays: list[Array]
    structure: Structure
    start: int

    @property
    def floating(self) -> list[int]:
        """Which of the arrays have derivatives."""
        return [i for i, x in enumerate(self.arrays) if x.dtype.name in DIFFERENTIABLE]

    def like(self, values: Sequence[Array]) -> Any:
        """Return a tree like the argument with these values as its floating leaves."""
        return self.structure.like(spread(values, self.floating, len(self.arrays)))


class Recording:
    """One evaluation, and the way back from its results to the arguments."""

    def __init__(self, call: str, arguments: list[Argument]) -> None:
        self.call, self.arguments = call, arguments
        self.wanted = [a.start + i for a in arguments for i in a.floating]
        self._primals = [a.arrays[i] for a in arguments for i in a.floating]

    def check(self, number: int, argument: Argument) -> None:
        """Raise a NotDifferentiableError unless there is a derivative in the argument."""
        if not argument.floating:
            raise NotDifferentiableError.of_argument(self.call, number, "holds no floating or complex array")

    def evaluated(self, outcome: Outcome, back: Relay) -> None:
        """Take what the relay gave; of the results, which the caller may write to, keep the specs."""
        assert outcome.structure is not None
        self._back, self._structure = back, outcome.structure
        self._outputs = [i for i, is_output in enumerate(outcome.differentiable) if is_output]
        self._specs = [convert.spec(y) for y in outcome.leaves if y is not None]

    def one(self) -> Array:
        """Return the cotangent of a result that is one real number."""
        found = self._specs
        if not self._structure.is_tensor or found[0].shape != () or found[0].dtype not in DIFFERENTIABLE - COMPLEX:
            raise OutputError.not_scalar(self.call, found)
        return np.ones((), dtype(found[0].dtype))

    def pull(self, cts: Sequence[Array | None]) -> list[Any]:
        """Return the cotangent of each argument by those of the differentiable results."""
        found = self._back([*self._primals, *cts]).leaves if self._primals else []
        pulled = iter(filled(found, map(convert.spec, self._primals)))
        return [argument.like([next(pulled) for _ in argument.floating]) for argument in self.arguments]

    def pull_twice(self) -> tuple[Outcome, Relay]:
        """Return the gradient of a result that is one real number, and the way back from it."""
        return self._back.vjp([*self._primals, self.one()], range(len(self._primals)))

    def push(self, tangents: Sequence[Array]) -> Any:
        """Return the tangent of the result."""
        specs = [self._specs[i] for i in self._outputs]
        found: Sequence[Array | None] = [None] * len(specs)
        if self._primals:
            ones = [np.ones_like(x) for x in filled(found, specs)]
            found = orders.push(self._back, self._primals, ones, tangents)
        return self._structure.like(spread(filled(found, specs), self._outputs, len(self._specs)))

    def cotangents(self, ct: Any) -> list[Array | None]:
        """Return the leaves of a cotangent of the result that belong to differentiable results."""
        found = self._matched(self._structure, ct, "the cotangent")
        named = [(i, f"the cotangent of {self._structure.result(i)}") for i in self._outputs]
        return [_fitting(self.call, found[i], self._specs[i], where) for i, where in named]

    def tangents(self, tangents: Sequence[Any]) -> list[Array]:
        """Return the leaves of tangents that belong to what is differentiated, zeros for None."""
        if len(tangents) != len(self.arguments):
            raise CotangentError.misfit(self.call, "the tangents", f"{len(tangents)}", f"{len(self.arguments)}")
        found: list[Array | None] = []
        for number, (argument, given) in enumerate(zip(self.arguments, tangents, strict=True)):
            leaves = self._matched(argument.structure, given, f"the tangent of args[{number}]")
            for i in argument.floating:
                where = f"the tangent of {argument.structure.path(i, f'args[{number}]')}"
                found.append(_fitting(self.call, leaves[i], convert.spec(argument.arrays[i]), where))
        return filled(found, map(convert.spec, self._primals))

    def _matched(self, structure: Structure, tree: Any, what: str) -> list[Any]:
        try:
            return structure.unlike(tree)
        except ValueError as error:
            raise CotangentError.misfit(self.call, what, f"another tree ({error})", "one like it") from error


waiting: ContextVar[Recording | None] = ContextVar("waiting", default=None)
"""What the next flat call on this thread is to be recorded in."""


@contextmanager
def waiting_for(recording: Recording | None) -> Iterator[None]:
    """Let the flat calls of the block be recorded in `recording`."""
    before = waiting.get()
    try:  # an interrupt may come as soon as it is set
        waiting.set(recording)
        yield
    finally:
        waiting.set(before)


def recorded(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[int], strict: bool = False
) -> tuple[Any, Recording]:
    """Call the function and record its evaluation for the derivative in the arguments of these numbers.

    Raises:
        NotDifferentiableError: there is no argument of a number; or if `strict`, it holds values of Python alone.
    """
    arguments, start = [], 0
    for arg in args:
        arrays, structure = trees.separate(arg, _classify, _kept)
        arguments.append(Argument(arrays, structure, start))
        start += len(arrays)
    chosen = []
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise NotDifferentiableError.without_argument(function.__name__, number, len(args))
        chosen.append(arguments[number])
    recording = Recording(function.__name__, chosen)
    for number, argument in zip(numbers, chosen, strict=True):
        if strict and all(isinstance(leaf, _PYTHONS) for leaf in trees.flatten(args[number])[0]):
            recording.check(number, argument)  # such as a list of numbers, for which the function may not be made
    with waiting_for(recording):
        return function(*args, **kwargs), recording


def _classify(leaf: Any) -> Kind:
    return Kind.TENSOR if isinstance(leaf, trees.ARRAYS) else Kind.STATIC


def _kept(kind: Kind, leaf: Any, treedef: Any, position: int) -> Any:
    raise AssertionError("every leaf is an array or static")


def _fitting(call: str, value: Any, spec: TensorSpec, where: str) -> Array | None:
    """Return a cotangent or tangent as an array if it fits; a Python number does where there are no dimensions."""
    if value is None:
        return None
    if type(value) in (int, float, complex) and spec.shape == ():
        return np.asarray(value, dtype(spec.dtype))
    if not convert.is_tensor(value):
        raise CotangentError.misfit(call, where, f"a {type(value).__name__}", spec)
    if convert.spec(value) != spec:
        raise CotangentError.misfit(call, where, convert.spec(value), spec)
    return np.asarray(value)


def filled(arrays: Iterable[Array | None], specs: Iterable[TensorSpec]) -> list[Array]:
    """Return the arrays with zeros for None: NumPy has no word for "no gradient"."""
    return [np.zeros(spec.shape, dtype(spec.dtype)) if x is None else x for x, spec in zip(arrays, specs, strict=True)]
