"""What is known of a tensor without its values, and the one table of dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from polybridge.core import trees

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

COMPLEX = frozenset({"complex64", "complex128"})
DIFFERENTIABLE = COMPLEX | {"float16", "bfloat16", "float32", "float64"}
INTEGER = frozenset({"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})
SUPPORTED = DIFFERENTIABLE | INTEGER


@cache
def dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`, bfloat16 included."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Args:
        shape: one entry a dimension, None for a dimension that is not known; None for an unknown rank.
        dtype: the NumPy name of the dtype, such as "float32" or "bfloat16".
    """

    shape: tuple[int | None, ...] | None
    dtype: str

    @property
    def differentiable(self) -> bool:
        """Whether values of this dtype have derivatives (floating and complex ones do)."""
        return self.dtype in DIFFERENTIABLE

    @property
    def concrete(self) -> bool:
        """Whether every dimension is known."""
        return self.shape is not None and None not in self.shape

    def with_unknown(self, size: int) -> TensorSpec:
        """Return the spec with `size` in place of each unknown dimension."""
        assert self.shape is not None
        return TensorSpec(tuple(size if n is None else n for n in self.shape), self.dtype)

    def with_first(self, size: int | None) -> TensorSpec:
        """Return the spec with a dimension of `size` before the others."""
        return TensorSpec(None if self.shape is None else (size, *self.shape), self.dtype)

    def without(self, axis: int | None) -> TensorSpec:
        """Return the spec without one dimension; with all of them for None."""
        if axis is None or self.shape is None:
            return self
        return TensorSpec(tuple(n for i, n in enumerate(self.shape) if i != axis), self.dtype)

    def merge(self, other: TensorSpec) -> TensorSpec:
        """Return the most precise spec that both fit."""
        if self.shape is None or other.shape is None or len(self.shape) != len(other.shape):
            return TensorSpec(None, self.dtype)
        dims = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        return TensorSpec(dims, self.dtype)

    def admits(self, other: TensorSpec) -> bool:
        """Whether a tensor of spec `other` keeps the promise of this one."""
        if self.dtype != other.dtype:
            return False
        if self.shape is None or other.shape is None:
            return True
        return len(self.shape) == len(other.shape) and all(
            a is None or a == b for a, b in zip(self.shape, other.shape, strict=True)
        )

    def __str__(self) -> str:
        """Write it as `float32[2, ?]`."""
        dims = "..." if self.shape is None else ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.dtype}[{dims}]"


def check_promise(tree: Any) -> None:
    """Look at the tree that a user gives as `output_specs=`, before a graph is made of it.

    Raises:
        TypeError: it holds the spec of another library.
        ValueError: a shape or dtype is none.
    """
    leaves, treedef = trees.flatten(tree, lambda leaf: isinstance(leaf, TensorSpec))
    for position, leaf in enumerate(leaves):
        is_spec = isinstance(leaf, TensorSpec)
        if not is_spec and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            continue
        where = f"`polybridge.wrap`: {trees.path(treedef, position, 'output_specs')} is {leaf!r:.80}"
        if not is_spec:
            raise TypeError(f"{where}. Give a `polybridge.TensorSpec(shape, dtype)` there.")
        if leaf.dtype not in SUPPORTED:
            raise ValueError(f"{where}, but its dtype is no name of one that crosses: {', '.join(sorted(SUPPORTED))}.")
        sizes = () if leaf.shape is None else leaf.shape
        if not isinstance(sizes, tuple) or not all(
            n is None or (isinstance(n, (int, np.integer)) and n >= 0) for n in sizes
        ):
            raise ValueError(f"{where}, but a shape is a tuple of sizes, with None for one that varies, or None.")
