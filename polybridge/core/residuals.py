"""Numbers that stand for residuals where only tensors can go, and live as long as a small buffer with the number.

A framework's transform passes tensors from a forward to its backward and nothing else. So the forward hands out a
token: a tensor on the buffer's memory. With the last reader of that memory the buffer dies, and the residual with it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np

from polybridge.core.errors import ResidualError
from polybridge.core.relay import Relay

_ALIGNMENT = 64  # bytes, more than any framework asks for
_numbers = itertools.count(1)
_residuals: dict[int, tuple[Relay, weakref.ref[Any]]] = {}  # by number, with what waits for the buffer's death


def keep(back: Relay) -> np.ndarray[Any, Any]:
    """Return a buffer with one int64, which keeps the residual alive."""
    number = next(_numbers)
    buffer = np.zeros(1 + 2 * _ALIGNMENT // 8, dtype=np.int64).view(_Buffer)
    start = -buffer.__array_interface__["data"][0] % _ALIGNMENT // 8
    token = buffer[start : start + 1]
    token[0] = number
    _residuals[number] = back, weakref.ref(buffer, lambda _: _residuals.pop(number, None))
    return token.view(np.ndarray)


def kept(number: int) -> Relay:
    """Return the residual of a token's number.

    Raises:
        ResidualError: the buffer is gone.
    """
    back, _ = _residuals.get(number, (None, None))
    if back is None:
        raise ResidualError.gone()
    return back


class _Buffer(np.ndarray):
    """A plain array that can carry a finalizer."""
