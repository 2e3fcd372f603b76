"""Tokens of batches, as JAX and TensorFlow pass them on: each row has the residual's number, its place and how many."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    if token.shape == (SIZE,):
        token[0], token[1] = number, _ALONE
        return
    rows = token.reshape(-1, SIZE)
    rows[:, 0], rows[:, 1] = number, _places(len(rows))


def read(token: Array) -> int:
    """Return the number of the residual; 0 where there is none.

    A row of zeros belongs to an example that did not come here: in a batch, `jax.lax.cond` takes both of its branches,
    and drops what it does not want.

    Raises:
        ResidualError: the other rows are not those of one evaluation in their order.
    """
    if token.shape == (SIZE,):
        number, place = token.tolist()
        is_whole = place == _ALONE or not (number or place)
    else:
        rows = token.reshape(-1, SIZE)
        number = int(rows[:, 0].max(initial=0))
        expected = np.stack([np.full(len(rows), number), _places(len(rows))], axis=-1)
        is_whole = bool(((rows == expected) | ~rows.any(axis=1, keepdims=True)).all())
    if not is_whole:
        raise ResidualError.mixed()
    return int(number)


class Part(NamedTuple):
    """A residual and its rows of a token.

    Args:
        number: of the residual.
        rows: for each row whether it is one of them.
    """

    number: int
    rows: Array


def parts(token: Array) -> list[Part]:
    """Return the residuals that the token of a batch has rows of.

    Where each example of a batch takes one of several branches, `jax.lax.cond` lets calls in different branches share a
    token: a row is of the call in the branch that was taken. Nobody reads what another call's derivative is there.

    Raises:
        ResidualError: a row is not at its place in the batch of its evaluation.
    """
    rows = token.reshape(-1, SIZE)
    numbers, there = rows[:, 0], rows.any(axis=1)
    if not ((rows[:, 1] == _places(len(rows))) | ~there).all() or not numbers[there].all():
        raise ResidualError.mixed()
    found = np.unique(numbers[there]).tolist()
    return [Part(number, (numbers == number).reshape(token.shape[:-1])) for number in found]


def _places(count: int) -> Array:
    return np.arange(count) | count << 32
