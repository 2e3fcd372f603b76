"""NumPy arrays in and out: dtypes, layouts, byte order, scalars."""

from __future__ import annotations

from typing import Any

import numpy as np

from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.specs import SUPPORTED, TensorSpec

Array = np.ndarray[Any, Any]


def is_tensor(value: Any) -> bool:
    """Whether it is an array, or a scalar, which NumPy returns where an array would have no dimensions."""
    return isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray)


def spec(array: Array) -> TensorSpec:
    """Return shape and dtype.

    Raises:
        UnsupportedTensorError: objects, strings, dates, records and long doubles.
    """
    name = array.dtype.name
    if name not in SUPPORTED:
        raise UnsupportedTensorError(f"an array of dtype {name}")
    return TensorSpec(array.shape, name)


def dense(array: Array) -> Array:
    """Return a plain array on the same memory, in whatever layout: who takes it copies it.

    Raises:
        UnsupportedTensorError: as `spec`.
    """
    spec(array)
    return np.asarray(array)


def from_numpy(array: Array) -> Array:
    """Return a writable copy of the values, row-major and in native byte order."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
