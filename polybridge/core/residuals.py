"""Numbers that stand for residuals where only tensors can go.

A framework's transform passes tensors from a forward to its backward and nothing else. So the forward hands out a
token: a tensor with a number. Where the framework takes memory in, the token is a buffer of ours: with its last reader
it dies, and the residual with it. Where the framework copies the number, nothing tells when it is done with; the
residual is stashed with a bounded number of others, and made by another evaluation if a backward comes later than that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from polybridge.core.backend import Context
from polybridge.core.errors import ResidualError
from polybridge.core.relay import Relay

_ALIGNMENT = 64  # bytes, more than any framework asks for
_numbers = itertools.count(1)
OWNERS = 1 << 22  # how many can be told apart
_OWNER = 40  # the first bit of the owner in a number
_residuals: dict[int, tuple[Relay, weakref.ref[Any]]] = {}  # by number, with what waits for the buffer's death


def keep(back: Relay, count: int = 1) -> np.ndarray[Any, Any]:
    """Return a buffer with the same int64 `count` times, which keeps the residual alive."""
    number = next(_numbers)
    buffer = np.zeros(count + 2 * _ALIGNMENT // 8, dtype=np.int64).view(_Buffer)
    start = -buffer.__array_interface__["data"][0] % _ALIGNMENT // 8
    token = buffer[start : start + count]
    token[:] = number
    # A callback without Python code of its own, in which an interrupt would be lost.
    _residuals[number] = back, weakref.ref(buffer, functools.partial(_residuals.pop, number))
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


def stash(back: Relay, outputs: Sequence[np.ndarray[Any, Any]], randomness: Context | None, owner: int = 0) -> int:
    """Keep a residual for a while, and for longer what is needed to evaluate it again; return its number.

    Args:
        back: the residual.
        outputs: of its forward.
        randomness: from `Backend.randomness`, before the forward.
        owner: less than `OWNERS`, for a number that shows whose residual it is.
    """
    number = next(_numbers) | owner << _OWNER
    kept = back, _Forward(_fingerprint(outputs), randomness, sum(map(_nbytes, outputs)))
    with _lock:
        dropped = _waiting.add(number, kept)
    del dropped  # not before the lock is free
    return number


def owner(number: int) -> int:
    """Return who has stashed the residual of a token's number."""
    return number >> _OWNER


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
        kept, table = _waiting.take(number), _used_once  # most are asked for once: these make room first
        if kept is None:
            kept, table = _used_once.take(number) or _used.take(number), _used
        if kept is not None:
            dropped = table.add(number, kept)
        else:
            forward = _waiting.forward(number) or _used_once.forward(number) or _used.forward(number)
    if kept is not None:
        del dropped  # not before the lock is free
        return kept[0]
    if forward is None:
        raise ResidualError.gone()
    with (forward.randomness or contextlib.nullcontext)():
        back, outputs = again()
    if _fingerprint(outputs) != forward.fingerprint:
        raise ResidualError.differs()
    with _lock:
        dropped = _used.add(number, (back, forward))
    del dropped  # as above
    return back


class _Forward(NamedTuple):
    """What is known of a forward whose residual may be gone; its outputs' bytes stand for those of the residual."""

    fingerprint: int
    randomness: Context | None
    size: int


_Kept = tuple[Relay, _Forward]


class _Table:
    """Residuals by number, the oldest of which make room; used under the lock, after which those may die.

    Args:
        entries: how many are kept.
        size: how many bytes their outputs may have.
        remembered: of how many that have made room is known what it takes to evaluate them again.
    """

    def __init__(self, entries: int, size: int, remembered: int) -> None:
        self.entries, self.size, self.remembered = entries, size, remembered
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._forwards: OrderedDict[int, _Forward] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, number: int, kept: _Kept) -> list[Relay]:
        """Add a residual, and return those that make room, of whose forwards is remembered what is known."""
        table = self._kept
        table[number] = kept
        self._total += kept[1].size
        dropped = []
        while (len(table) > self.entries or self._total > self.size) and len(table) > 1:  # the newest stays
            oldest, (back, forward) = table.popitem(last=False)
            self._total -= forward.size
            dropped.append(back)
            self._forwards[oldest] = forward
            if len(self._forwards) > self.remembered:
                self._forwards.popitem(last=False)
        return dropped

    def forward(self, number: int) -> _Forward | None:
        """Return what is known of a residual that has made room, None if it never was here or that was long ago."""
        return self._forwards.get(number)

    def take(self, number: int) -> _Kept | None:
        """Remove a residual and return it, None if it is not here."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            self._total -= kept[1].size
        return kept


def _fingerprint(outputs: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return a checksum of the outputs, of large ones of scattered values: another dropout mask shows in it."""
    found = 0
    for y in outputs:
        values = y if y.size <= _WHOLE else y.reshape(-1)[_scattered(y.size)]
        found = zlib.crc32(values.tobytes(), found)
    return found


@functools.lru_cache(maxsize=256)
def _scattered(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(size, size=_WHOLE)


_nbytes = attrgetter("nbytes")
_WHOLE = 512  # values of an output that are looked at
_lock = threading.RLock()  # never held while a framework is called; handlers of signals and finalizers may come here
# A scan leaves all of its steps here before the first is asked for, and those do not make others be forgotten.
_waiting = _Table(entries=4096, size=1 << 30, remembered=16384)  # up to 5 KB each, of random functions of torch
_used_once = _Table(entries=64, size=1 << 24, remembered=4096)  # little: `jax.checkpoint` is to free memory
_used = _Table(entries=64, size=1 << 28, remembered=4096)


class _Buffer(np.ndarray):
    """A plain array that can carry a finalizer."""
