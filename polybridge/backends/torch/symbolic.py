"""The plan of an evaluation in a graph whose sizes are symbols: the sizes of the results by those of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes  # private: there is no public way out of a trace

from polybridge.backends.torch import convert
from polybridge.core.abstract import Abstract
from polybridge.core.batching import BatchedRelay
from polybridge.core.errors import PromisedShapeError
from polybridge.core.relay import FunctionRelay
from polybridge.core.specs import TensorSpec

Tensor = torch.Tensor
Size = int | torch.SymInt
Form = tuple[int, int, int] | None
"""`(place, factor, offset)` of a size that is `factor * (size of the inputs at place) + offset`; None if it is not."""

# The sizes at which a symbol is tried, and what is added for each further one, so that no symbol looks like a multiple
# of another: even, odd, and a third that has to confirm the other two, as has the size of the example.
_TRIED = ((16, 3), (25, 5), (37, 11))


@dataclass
class Plan:
    """What an evaluation returns.

    Attributes:
        abstract: the plan, in which sizes that vary are None.
        forms: of those, by result and dimension.
    """

    abstract: Abstract
    forms: dict[tuple[int, int], Form]

    @cached_property
    def connected(self) -> tuple[bool, ...] | None:
        """For each differentiable input whether a derivative with respect to it exists; None if nobody can tell."""
        with _disable_current_modes():
            return self.abstract.connected

    @property
    def kinds(self) -> str:
        """The dtypes and ranks of all results, as in `float32/2 int64/0`."""
        return " ".join(f"{spec.dtype}/{len(_shape(spec))}" for spec in self.abstract.specs)

    def sizes(self, xs: Sequence[Tensor]) -> list[Size]:
        """Return the promised sizes of all results, one after the other, -1 for what cannot be known."""
        given = sizes(xs)
        return [
            self._size(i, axis, n, given)
            for i, spec in enumerate(self.abstract.specs)
            for axis, n in enumerate(_shape(spec))
        ]

    def _size(self, result: int, axis: int, known: int | None, given: Sequence[Size]) -> Size:
        if known is not None:
            return known
        form = self.forms.get((result, axis))
        if form is None:  # no single size of the inputs gives it, such as a product
            return -1
        place, factor, offset = form
        return factor * given[place] + offset

    def empty(self, promised: Sequence[Size]) -> list[Tensor]:
        """Return tensors of promised sizes, in a fake implementation of an operation."""
        following = iter(promised)
        return [
            convert.empty([_known(next(following)) for _ in _shape(spec)], spec.dtype) for spec in self.abstract.specs
        ]


def sizes(xs: Sequence[Tensor]) -> list[Size]:
    """Return the sizes of tensors, one after the other."""
    return [size for x in xs for size in x.shape]


def key(xs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what a plan depends on: names and values of symbols."""
    return tuple((convert.dtype_name(x), *((str(size), _hint(size)) for size in x.shape)) for x in xs)


def plan(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor]) -> Plan:
    """Return the plan for tensors whose sizes may be symbols.

    A function that does not run at the sizes that are tried gets a graph for each size that comes: torch is told that
    the symbols are numbers.
    """
    with _disable_current_modes():
        return _plan(relay, xs)


def _plan(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor]) -> Plan:
    wanted = [i for i, x in enumerate(xs) if convert.is_differentiable(x)]
    expressions = [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes(xs)]
    symbols = sorted(set().union(*(e.free_symbols for e in expressions if not isinstance(e, int))), key=str)
    if symbols:
        try:
            return _fitted(relay, xs, wanted, expressions, symbols)
        except Exception:  # not at these sizes; what fails at every size fails again
            pass
    specs = [TensorSpec(tuple(map(int, x.shape)), convert.dtype_name(x)) for x in xs]
    return Plan(relay.abstract(specs, wanted), {})


def _fitted(
    relay: FunctionRelay | BatchedRelay,
    xs: Sequence[Tensor],
    wanted: Sequence[int],
    expressions: Sequence[Any],
    symbols: Sequence[Any],
) -> Plan:
    tried, found = [], []
    points = [{symbol: first + step * i for i, symbol in enumerate(symbols)} for first, step in _TRIED]
    candidates = [[e if isinstance(e, int) else int(e.xreplace(point)) for e in expressions] for point in points]
    hints = [_hint(size) for size in sizes(xs)]
    for numbers in candidates if None in hints else [*candidates, cast(list[int], hints)]:
        following = iter(numbers)
        specs = [TensorSpec(tuple(next(following) for _ in x.shape), convert.dtype_name(x)) for x in xs]
        tried.append(numbers)
        found.append(relay.abstract(specs, wanted))
    places = [i for i, e in enumerate(expressions) if not isinstance(e, int)]
    forms: dict[tuple[int, int], Form] = {}
    specs = []
    for result, versions in enumerate(zip(*(f.specs for f in found), strict=True)):
        merged = functools.reduce(TensorSpec.merge, versions)
        if merged.shape is None:
            raise PromisedShapeError.unknown(relay.call, versions, ValueError("the rank depends on the sizes"))
        for axis, known in enumerate(merged.shape):
            if known is None and None not in (values := [version.shape[axis] for version in versions]):
                forms[result, axis] = _form(tried, values, places)
        specs.append(merged)
    found[0].specs = specs
    return Plan(found[0], forms)


def _form(tried: Sequence[Sequence[int]], values: Sequence[int], places: Sequence[int]) -> Form:
    for place in places:
        given = [numbers[place] for numbers in tried]
        factor, rest = divmod(values[1] - values[0], given[1] - given[0])
        offset = values[0] - factor * given[0]
        if not rest and all(value == factor * n + offset for value, n in zip(values, given, strict=True)):
            return place, factor, offset
    return None


def _shape(spec: TensorSpec) -> tuple[int | None, ...]:
    assert spec.shape is not None
    return spec.shape


def _known(size: Size) -> Size:
    return torch.library.get_ctx().new_dynamic_size() if isinstance(size, int) and size < 0 else size


def _hint(size: Size) -> int | None:
    """Return the size of the example that is traced; None for one that depends on values."""
    hint: int | None = size.node.hint if isinstance(size, torch.SymInt) else size
    return hint
