"""Looks into a DLPack capsule, because one importer aborts the process on memory that it cannot take.

A capsule holds a `DLManagedTensor` whose first member is the `DLTensor`: data pointer (8 bytes), device (8),
ndim (4), dtype (4), shape (8), strides (8), byte offset (8). Source: dlpack.h, version 0.8 and later.
"""

from __future__ import annotations

import ctypes
from typing import Any


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64), ("between", ctypes.c_char * 32), ("byte_offset", ctypes.c_uint64))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def address(capsule: Any) -> int:
    """Return the address of the first element of the tensor in an unversioned, unused capsule."""
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    return int(tensor.data + tensor.byte_offset)
