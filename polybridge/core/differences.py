"""Derivatives by central differences, for functions that nobody can differentiate.

Every floating number is a coordinate, a complex one is two. The pullback of y = f(x) sums, over the outputs, the real
inner product of cotangent and change; of a holomorphic function that is `conj(f'(z)) * ct`, as everywhere here.

The step balances the error of the formula against that of rounding: `eps ** (1/3)` for first derivatives and
`eps ** (1/4)` for second ones, times `max(1, |x|)`, with the eps of the input's dtype. The function runs in its own
dtype; differences are taken in float64, and divided by the steps that rounding has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from polybridge.core.backend import Backend, NoPullback, Pullback
from polybridge.core.errors import NotDifferentiableError, OutputError
from polybridge.core.specs import TensorSpec, dtype

Tensor = Any
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Space:
    """Tensors of some specs as one vector of float64 coordinates, and back.

    Args:
        source: the backend of the tensors.
        specs: of the tensors; floating or complex.
    """

    source: Backend
    specs: Sequence[TensorSpec]

    @cached_property
    def zeros(self) -> list[Array]:
        """An array of each spec."""
        return [np.zeros(spec.shape, dtype(spec.dtype)) for spec in self.specs]

    @cached_property
    def eps(self) -> Array:
        """The rounding of each coordinate's dtype."""
        return np.concatenate([np.empty(0), *(np.full(_reals(x).shape, _eps(x)) for x in self.zeros)])

    def coordinates(self, tensors: Sequence[Tensor | None]) -> Array:
        """Return the coordinates of tensors; None stands for zeros."""
        arrays = [z if x is None else self.source.to_numpy(x) for x, z in zip(tensors, self.zeros, strict=True)]
        return np.concatenate([np.empty(0), *map(_reals, arrays)])

    def tensors(self, coordinates: Array) -> list[Tensor]:
        """Return new tensors of these coordinates, rounded to their dtypes."""
        return [self.source.from_numpy(x) for x in self._arrays(coordinates)]

    def rounded(self, coordinates: Array) -> Array:
        """Return the coordinates of such tensors."""
        return np.concatenate([np.empty(0), *map(_reals, self._arrays(coordinates))])

    def _arrays(self, coordinates: Array) -> list[Array]:
        arrays = [x.copy() for x in self.zeros]
        start = 0
        for x in arrays:
            parts = _parts(x)
            parts[...] = coordinates[start : start + parts.size]
            start += parts.size
        return arrays


@dataclass(frozen=True)
class Function:
    """A function from one space to another, at one point.

    Args:
        call: how messages name it.
        run: evaluates it at tensors that it may keep or write to.
        inputs: its primals.
        outputs: its results.
        at: the coordinates of the point.
    """

    call: str
    run: Callable[[list[Tensor]], list[Tensor]]
    inputs: Space
    outputs: Space
    at: Array

    def __call__(self, moved: Array) -> Array:
        """Return the coordinates of the results at other coordinates."""
        results = self.run(self.inputs.tensors(moved))
        found = [self.outputs.source.spec(y) for y in results]
        if found != list(self.outputs.specs):
            raise OutputError.uneven(self.call, found, self.outputs.specs)
        return self.outputs.coordinates(results)

    def steps(self, power: float) -> Array:
        """Return how far each coordinate moves."""
        steps: Array = self.inputs.eps**power * np.maximum(1.0, np.abs(self.at))
        return steps

    def step_along(self, direction: Array, power: float) -> float:
        """Return the multiple of a direction by which no coordinate moves further than its own step."""
        moving = direction != 0
        return float(np.min(self.steps(power)[moving] / np.abs(direction[moving]), initial=np.finfo(float).max))

    def along(self, direction: Array) -> Array:
        """Return the derivative of the results along a direction, by two runs."""
        if not direction.any():
            return np.zeros_like(self.outputs.eps)
        step = self.step_along(direction, 1 / 3)
        return (self(self.at + step * direction) - self(self.at - step * direction)) / (2 * step)

    def gradient(self, value: Callable[[Array], float], power: float) -> Array:
        """Return the gradient of a number that depends on the coordinates, by two evaluations for each of them."""
        gradient = np.empty_like(self.at)
        for j, step in enumerate(self.steps(power)):
            up, down = self.at.copy(), self.at.copy()
            up[j] += step
            down[j] -= step
            up, down = self.inputs.rounded(up), self.inputs.rounded(down)
            gradient[j] = (value(up) - value(down)) / (up[j] - down[j])
        return gradient


class Differences(Pullback):
    """The pullback of one evaluation. Costs two runs of the function for each coordinate of its primals."""

    def __init__(self, function: Function) -> None:
        """Keep the function, at its point."""
        self._function = function

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Move each coordinate there and back."""
        f, weights = self._function, self._function.outputs.coordinates(cts)
        return f.inputs.tensors(f.gradient(lambda at: float(weights @ f(at)), 1 / 3))

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        """Pull back, and be ready to do so at two near points."""
        f = self._function
        if max(f.inputs.eps.max(initial=0), f.outputs.eps.max(initial=0)) > _HALF_PRECISION:
            return self(cts), NoPullback(NotDifferentiableError.beyond_differences(f.call, "twice in half precision"))
        return self(cts), _SecondDifferences(f, f.outputs.coordinates(cts))

    def jvp(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Move all coordinates at once."""
        f = self._function
        return f.outputs.tensors(f.along(f.inputs.coordinates(tangents)))


class _SecondDifferences(Pullback):
    """The pullback of a pullback. Costs four runs of the function for each coordinate of its primals, and two more."""

    def __init__(self, function: Function, weights: Array) -> None:
        self._function, self._weights = function, weights

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        f, weights = self._function, self._weights
        direction = f.inputs.coordinates(cts)
        step = f.step_along(direction, 1 / 4)

        def slope(at: Array) -> float:
            return float(weights @ (f(at + step * direction) - f(at - step * direction)) / (2 * step))

        by_primals = f.gradient(slope, 1 / 4) if direction.any() else np.zeros_like(f.at)
        return [*f.inputs.tensors(by_primals), *f.outputs.tensors(f.along(direction))]

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        return self(cts), NoPullback(NotDifferentiableError.beyond_differences(self._function.call, "three times"))


_HALF_PRECISION = 1e-5  # eps: float16 and bfloat16 lie above, float32 below


def _parts(array: Array) -> Array:
    """Return the real numbers of a row-major array, real and imaginary ones in turn, as a vector on its memory."""
    return array.reshape(-1).view(array.real.dtype)


def _reals(array: Array) -> Array:
    return _parts(np.ascontiguousarray(array)).astype(np.float64)


def _eps(array: Array) -> float:
    return float(ml_dtypes.finfo(array.real.dtype).eps)  # type: ignore[no-untyped-call]
