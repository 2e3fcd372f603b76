"""What the tests need of a framework under one set of names, so that a test is written once for every pair."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polybridge

Tensor = Any
Array = np.ndarray[Any, Any]
Fn = Callable[..., Any]

NAMES = ("torch", "tensorflow", "jax")
"""The frameworks with a dialect; each lives in `dialect_<name>.py`."""
PAIRS = list(itertools.permutations(NAMES, 2))

FLOATING = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGER = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Dialect(ABC):
    """One framework: its tensors, its own derivatives, and its operations under NumPy's names.

    `+`, `*`, `@`, indexing and the like are written as operators.
    """

    name: str
    writes: bool
    """Whether a program can write to a tensor in place."""
    traces: bool = False
    """Whether a wrapped function is run once a signature, to be compiled, and not at every call."""
    sin: Fn
    cos: Fn
    exp: Fn
    tanh: Fn
    sqrt: Fn
    abs: Fn
    square: Fn
    softmax: Fn
    maximum: Fn
    where: Fn
    real: Fn
    imag: Fn
    conj: Fn
    complex: Fn
    zeros_like: Fn
    reshape: Fn
    identity: Fn
    """The argument itself, the same object."""
    copy: Fn
    """An operation that returns new memory of the same values."""
    stop_gradient: Fn

    @abstractmethod
    def tensor(self, values: Any, dtype: str | None = None) -> Tensor:
        """Return a new tensor of these values; Python floats become float32."""

    @abstractmethod
    def numpy(self, tensor: Tensor) -> Array:
        """Return a copy of the values."""

    @abstractmethod
    def dtype(self, tensor: Tensor) -> str:
        """Return the NumPy name of the dtype."""

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor of this framework."""

    @abstractmethod
    def parameter(self, values: Any) -> Tensor:
        """Return what this framework's programs train: a variable or parameter."""

    @abstractmethod
    def layouts(self) -> dict[str, Tensor]:
        """Return float32 tensors, each another way in which a program may hold its values in memory."""

    @abstractmethod
    def vjp(
        self, fn: Fn, xs: Sequence[Tensor], cts: Sequence[Array] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs of `fn(*xs)` (one tensor or a sequence) and the cotangent of each x, by native means.

        `cts` has one entry per differentiable output; without it they are `cotangent`s. None stands for "no gradient".
        """

    @abstractmethod
    def derivative(self, fn: Fn) -> Fn:
        """Return the derivative of a function of one tensor (its outputs summed), which can be differentiated again."""

    @abstractmethod
    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Sum over an axis or all."""

    @abstractmethod
    def max(self, x: Tensor, axis: int) -> Tensor:
        """Return the maximum along an axis."""

    @abstractmethod
    def argmax(self, x: Tensor) -> Tensor:
        """Return the int64 position of the maximum of a vector."""

    @abstractmethod
    def cumsum(self, x: Tensor, axis: int) -> Tensor:
        """Sum cumulatively."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Permute axes."""

    @abstractmethod
    def concat(self, xs: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Concatenate."""

    @abstractmethod
    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        """Gather rows."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Convert to the dtype of this NumPy name."""

    def gradient(self, fn: Fn, *xs: Tensor) -> Any:
        """Return the gradient of the sum of `fn(*xs)` in each x as NumPy arrays; a single one bare."""
        _, found = self.vjp(lambda *inner: self.sum(fn(*inner)), xs, [np.ones((), self.dtype(xs[0]))])
        arrays = [None if g is None else self.numpy(g) for g in found]
        return arrays[0] if len(xs) == 1 else arrays


@dataclass(frozen=True)
class Pair:
    """Where a function comes from and where it is called."""

    src: Dialect
    dst: Dialect

    def wrap(self, fn: Fn, **options: Any) -> Fn:
        """Return `polybridge.wrap` of this pair."""
        return polybridge.wrap(fn, src=self.src.name, dst=self.dst.name, **options)

    def reversed(self) -> Pair:
        """Return the pair of the other direction."""
        if (self.dst.name, self.src.name) not in PAIRS:
            pytest.skip(f"{self.src.name} is no destination yet")
        return Pair(self.dst, self.src)

    def assert_native(self, fn: Fn, *xs: Tensor, wrapped: Fn | None = None) -> None:
        """Assert that the wrapped function has the source's own values and gradients, bit by bit.

        It is called more than once, since polybridge handles a function that it knows otherwise than a new one.
        `wrapped` is there to share what a framework compiles with other tests.
        """
        expected = self.src.vjp(fn, [self.src.tensor(self.dst.numpy(x)) for x in xs])
        expected = [[None if x is None else self.src.numpy(x) for x in tensors] for tensors in expected]
        wrapped = wrapped or self.wrap(fn)
        for _ in range(3):
            for tensors, arrays in zip(self.dst.vjp(wrapped, xs), expected, strict=True):
                for tensor, array in zip(tensors, arrays, strict=True):
                    assert (tensor is None) == (array is None)
                    if array is not None:
                        assert_identical(self.dst.numpy(tensor), array)


def dialect(name: str) -> Dialect:
    """Return the dialect of a framework, importing it."""
    found: Dialect = importlib.import_module(f"tests.pairs.dialect_{name}").DIALECT
    return found


def assert_identical(found: Array, expected: Array) -> None:
    """Assert the same dtype, shape and bits, NaN and the sign of zero included."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if np.ascontiguousarray(found).tobytes() != np.ascontiguousarray(expected).tobytes():
        np.testing.assert_array_equal(found, expected, strict=True)
        raise AssertionError(f"equal values with other bits: {found!r} and {expected!r}")


def np_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def sample(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    """Return values in (-2, 2), small integers or booleans."""
    rng = np.random.default_rng(seed)
    if dtype in INTEGER:
        return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    values = rng.uniform(-2, 2, shape)
    return np.asarray(values + 1j * rng.uniform(-2, 2, shape) if dtype in COMPLEX else values).astype(np_dtype(dtype))


def cotangent(shape: Sequence[int], dtype: str) -> Array:
    """Return a cotangent whose elements differ."""
    return sample(tuple(shape), dtype, seed=7)
