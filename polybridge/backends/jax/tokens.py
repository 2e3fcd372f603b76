"""Tokens as JAX passes them on: for each row of a batch the number of a residual, which row it is, and of how many."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from polybridge.core import residuals
from polybridge.core.errors import ResidualError
from polybridge.core.relay import Relay

Array = np.ndarray[Any, Any]
SIZE = 4
"""Numbers of 32 bits in a row, since JAX may have no others: two are that of the residual."""
_ROW = struct.Struct("=QII")  # the number, which row it is, of how many


def keep(back: Relay, rows: tuple[int, ...]) -> Array:
    """Return a token of shape `(*rows, SIZE)` whose memory keeps the residual alive."""
    count = math.prod(rows)
    token = residuals.keep(back, SIZE // 2 * count).view(np.uint32).reshape(count, SIZE)
    token[:, 2:] = _places(count)
    return token.reshape(*rows, SIZE)


def write(token: Array, number: int) -> None:
    """Fill a token for a residual that is stashed."""
    if token.size == SIZE:
        _ROW.pack_into(token.data, 0, number, 0, 1)
        return
    rows = token.reshape(-1, SIZE)
    rows[:, :2], rows[:, 2:] = np.array([number], np.uint64).view(np.uint32), _places(len(rows))


def read(token: Array) -> int:
    """Return the number of the residual.

    Raises:
        ResidualError: the rows are not those of one evaluation in their order.
    """
    rows = np.ascontiguousarray(token).reshape(-1, SIZE)
    number, *place = _ROW.unpack_from(rows.data)
    if len(rows) == 1:
        is_whole = place == [0, 1]
    else:
        is_whole = (rows[:, 2:] == _places(len(rows))).all() and (rows[:, :2] == rows[0, :2]).all()
    if not is_whole:
        raise ResidualError.mixed()
    return int(number)


def _places(count: int) -> Array | tuple[int, int]:
    return (0, 1) if count == 1 else np.stack([np.arange(count), np.full(count, count)], axis=-1).astype(np.uint32)
