"""A program: what a source runs, as a flat function of its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from polybridge.core.backend import Backend
from polybridge.core.closures import is_module
from polybridge.core.errors import OutputError, PromisedShapeError, UnsupportedTensorError
from polybridge.core.exchange import array_to
from polybridge.core.functional import place
from polybridge.core.trees import Classifier, Kind, Structure, path, separate_result

if TYPE_CHECKING:
    from polybridge.core.evaluator import Evaluator  # which imports this module

Tensor = Any
Lent = Callable[[Callable[[Sequence[Tensor]], Any], Sequence[Tensor]], Any]
"""Runs a flat function on inputs, with whatever has to happen around it."""


@dataclass(slots=True)
class Results:
    """What a program returned: its tensors, which of them are differentiable, and the tree around them."""

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


class Program(ABC):
    """A flat function of a source's tensors.

    Attributes:
        fn: the user's own function.
        call: how messages name it.
        source: the backend that runs it.
        vectorises: whether its derivative over a batch is that of a vectorised function; a rule is for one example.
        told: whether somebody has looked for trainable state that gets no gradient, and warned of it.
        promised: the structure of the result, where the user gave one: dicts may have another order in the function.
    """

    fn: Callable[..., Any]
    call: str
    source: Backend
    vectorises: bool = True
    told: bool = False
    promised: Structure | None = None

    @abstractmethod
    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Run it."""

    @abstractmethod
    def argument(self, number: int) -> str:
        """Return where an input is among the arguments of the user's function."""

    def result(self, structure: Structure, number: int) -> str:
        """Return where a tensor is in the result of the user's function."""
        return structure.result(number)

    def evaluator(self, lent: Lent, copied: Lent) -> Evaluator:
        """Return how it is evaluated again and again: as its source does.

        Args:
            lent: runs a flat function on the caller's tensors.
            copied: runs one on placeholders.
        """
        return self.source.evaluator(partial(lent, self), partial(copied, self))


class UserFunction(Program):
    """The user's function, for arguments of one structure."""

    def __init__(
        self, fn: Callable[..., Any], call: str, source: Backend, structure: Structure, classify: Classifier
    ) -> None:
        """Prepare the program.

        Args:
            fn: the user's function.
            call: how messages name it.
            source: the function's backend.
            structure: of `(args, kwargs)`.
            classify: says what a leaf of the result is to the source.
        """
        self.fn, self.call, self.source = fn, call, source
        self._structure, self._classify = structure, classify
        self._place: Callable[[str], str] = place if is_module(fn) else str

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Run the function."""
        args, kwargs = self._structure.rebuild(inputs)
        return self._results(self.fn(*args, **kwargs))

    def _results(self, returned: Any) -> Results:
        tensors, structure = separate_result(returned, self._classify, self._converted)
        promised = self.promised
        if promised is not None and not structure.is_same(promised):
            try:
                tensors, structure = separate_result(promised.ordered(returned), self._classify, self._converted)
            except ValueError:  # of other containers
                raise self._differs(structure, promised) from None
            if not structure.is_same(promised):
                raise self._differs(structure, promised)
        try:
            differentiable = tuple(map(self.source.is_differentiable, tensors))
        except UnsupportedTensorError:
            raise self._unsupported(tensors, structure) from None
        return Results(tensors, differentiable, structure)

    def _differs(self, found: Structure, promised: Structure) -> PromisedShapeError:
        return PromisedShapeError.differs(self.call, "the result", found, promised)

    def argument(self, number: int) -> str:
        """Return the path of a leaf of `(args, kwargs)`, or the name of a weight."""
        return self._place(self._structure.argument(number))

    def result(self, structure: Structure, number: int) -> str:
        """Return the path of a leaf of the result, or the name of a state."""
        return self._place(structure.result(number))

    def _converted(self, kind: Kind, leaf: Any, treedef: Any, position: int) -> Tensor:
        where = self._place(path(treedef, position, "result"))
        if kind is Kind.FOREIGN:
            raise OutputError.foreign(self.call, where, type(leaf), self.source.name)
        if kind is Kind.COMPOSITE:
            raise UnsupportedTensorError.composite(leaf).at(self.call, where)
        return array_to(self.source, leaf, self.call, where)

    def _unsupported(self, tensors: list[Tensor], structure: Structure) -> UnsupportedTensorError:
        for number, tensor in enumerate(tensors):
            try:
                self.source.is_differentiable(tensor)
            except UnsupportedTensorError as error:
                return error.at(self.call, self.result(structure, number))
        raise AssertionError("a tensor that was refused is accepted now")
