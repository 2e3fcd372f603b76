"""Numbers that stand for residuals where only tensors can go.

A framework's transform passes tensors from a forward to its backward and nothing else. So the forward hands out a
token: a tensor with a number. Where the framework takes memory in, the token is a buffer of ours: with its last reader
it dies, and the residual with it. Where the framework copies the number, nothing tells when it is done with; the
residual is stashed with a bounded number of others, and made by another evaluation if a backward comes later than that.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polybridge.core.backend import Context
from polybridge.core.errors import ResidualError
from polybridge.core.relay import Relay

_ALIGNMENT = 64  # bytes, more than any framework asks for
_numbers = itertools.count(1)
_residuals: dict[int, tuple[Relay, weakref.ref[Any]]] = {}  # by number, with what waits for the buffer's death


def keep(back: Relay, count: int = 1) -> np.ndarray[Any, Any]:
    """Return a buffer with the same int64 `count` times, which keeps the residual alive."""
    number = next(_numbers)
    buffer = np.zeros(count + 2 * _ALIGNMENT // 8, dtype=np.int64).view(_Buffer)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer.data)) % _ALIGNMENT // 8  # a quarter of NumPy's own way
    token = buffer[start : start + count]
    token.fill(number)
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


def stash(back: Relay, outputs: Sequence[np.ndarray[Any, Any]], randomness: Context | None) -> int:
    """Keep a residual for a while, and for longer what is needed to evaluate it again; return its number.

    Args:
        back: the residual.
        outputs: of its forward.
        randomness: from `Backend.randomness`, before the forward.
    """
    number = next(_numbers)
    with _lock:
        _stashed[number] = back
        _forwards[number] = _Forward(_fingerprint(outputs), randomness)
        for table, bound in ((_stashed, _STASHED), (_forwards, _FORWARDS)):
            while len(table) > bound:
                table.popitem(last=False)
    return number


def stashed(number: int, again: Callable[[], tuple[Relay, Sequence[np.ndarray[Any, Any]]]]) -> Relay:
    """Return the residual of a token's number, wherever it is.

    Args:
        number: of the token.
        again: evaluates the forward once more, and returns its residual and outputs.

    Raises:
        ResidualError: the residual is gone, and another evaluation gave other values, or was too long ago.
    """
    found = _residuals.get(number)
    if found is not None:
        return found[0]
    with _lock:
        back = _stashed.pop(number, None)
        if back is not None:  # most are asked for once: those that were make room before the others
            _used[number] = back
            while len(_used) > _USED:
                _used.popitem(last=False)
            return back
        back = _used.get(number)
        if back is not None:
            return back
        forward = _forwards.get(number)
    if forward is None:
        raise ResidualError.gone()
    with (forward.randomness or contextlib.nullcontext)():
        back, outputs = again()
    if _fingerprint(outputs) != forward.fingerprint:
        raise ResidualError.differs()
    with _lock:
        _used[number] = back
    return back


@dataclass(frozen=True, slots=True)
class _Forward:
    """What is known of a forward whose residual may be gone."""

    fingerprint: bytes
    randomness: Context | None


def _fingerprint(outputs: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """Return some of the bytes of the outputs: another dropout mask shows in them."""
    samples = (y.reshape(-1)[:: max(1, y.size // _SAMPLES)] for y in outputs)
    return b"".join(sample.tobytes() for sample in samples)


_SAMPLES = 64  # values of each output
_STASHED, _USED, _FORWARDS = (
    256,
    4,
    4096,
)  # entries: residuals that wait, that were asked for, and what is known of them
_lock = threading.Lock()  # never held while a framework is called
_stashed: OrderedDict[int, Relay] = OrderedDict()
_used: OrderedDict[int, Relay] = OrderedDict()
_forwards: OrderedDict[int, _Forward] = OrderedDict()


class _Buffer(np.ndarray):
    """A plain array that can carry a finalizer."""
