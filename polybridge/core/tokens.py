"""Tokens of batches, as JAX and TensorFlow pass them on: each row has the residual's number, its place and how many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polybridge.core import residuals
from polybridge.core.errors import ResidualError
from polybridge.core.relay import Relay

Array = np.ndarray[Any, Any]
SIZE = 2
"""Numbers in a row, of 64 bits: that of the residual, and the row's place with the count of rows in the upper half."""
_ALONE = 1 << 32  # the first of one row


def keep(back: Relay, rows: tuple[int, ...]) -> Array:
    """Return a token of shape `(*rows, SIZE)` whose memory keeps the residual alive."""
    if not rows:
        token = residuals.keep(back, SIZE)
        token[1] = _ALONE
        return token
    count = math.prod(rows)
    token = residuals.keep(back, SIZE * count)
    token[1::2] = _places(count)
    return token.reshape(*rows, SIZE)


def write(token: Array, number: int) -> None:
    """Fill a token for a residual that is stashed."""
    rows = token.reshape(-1, SIZE)
    rows[:, 0], rows[:, 1] = number, _places(len(rows))


def read(token: Array) -> int:
    """Return the number of the residual; 0 for a token of zeros, which stands for none.

    Raises:
        ResidualError: the rows are not those of one evaluation in their order.
    """
    number: int
    if token.size == SIZE:
        number, place = token.tolist() if token.ndim == 1 else token.reshape(-1).tolist()
        is_whole = place == _ALONE or number == place == 0
    else:
        rows = token.reshape(-1, SIZE)
        number = int(rows[0, 0]) if len(rows) else 0
        places = _places(len(rows)) if number else 0
        is_whole = bool((rows[:, 1] == places).all() and (rows[:, 0] == number).all())
    if not is_whole:
        raise ResidualError.mixed()
    return number


def _places(count: int) -> Array:
    return np.arange(count) | count << 32
