"""NumPy arrays in and out: dtypes, layouts, byte order, scalars."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.specs import SUPPORTED, TensorSpec, dtype

Array = np.ndarray[Any, Any]
_NAMES = {dtype(name): name for name in SUPPORTED}


def is_tensor(value: Any) -> bool:
    """Whether it is an array, or a scalar, which NumPy returns where an array would have no dimensions."""
    return isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray)


def spec(tensor: Array) -> TensorSpec:
    """Return shape and dtype.

    Raises:
        UnsupportedTensorError: objects, strings, dates, records and long doubles.
    """
    return TensorSpec(tensor.shape, dtype_name(tensor))


def dtype_name(tensor: Array) -> str:
    """Return the name of the dtype, in whatever byte order.

    Raises:
        UnsupportedTensorError: as `spec`.
    """
    name = _NAMES.get(tensor.dtype) or tensor.dtype.name  # the latter takes 1 us
    if name not in SUPPORTED:
        raise UnsupportedTensorError(f"an array of dtype {name}")
    return name


def dense(tensor: Array) -> Array:
    """Return the array itself, in whatever layout; of a scalar or a subclass, a plain copy.

    Raises:
        UnsupportedTensorError: as `spec`.
    """
    dtype_name(tensor)
    return tensor if type(tensor) is np.ndarray else np.array(tensor)


def adopt(array: Array) -> Array | None:
    """Return the array itself, if it can be written to and is in native byte order."""
    return array if array.flags.behaved and array.dtype.isnative else None


def reference(tensor: Array) -> Array:
    """Return a view."""
    return np.asarray(tensor).view()


def owns(tensor: Array) -> bool:
    """Whether the array is a view of memory that NumPy allocated and that nothing else refers to."""
    base = tensor.base
    if not isinstance(base, np.ndarray) or not base.flags.owndata:
        return False
    del base
    return _uses(tensor) <= _USES_OF_ONE


def from_numpy(array: Array) -> Array:
    """Return a writable copy of the values, row-major and in native byte order."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _uses(view: Array) -> int:
    """Return how many refer to the array that a view is of."""
    return sys.getrefcount(view.base)


_USES_OF_ONE = _uses(np.empty(1).view())
