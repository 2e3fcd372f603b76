"""Moves one tensor between two backends: no bytes where that is safe, a copy where it is not.

Two verbs. A tensor is *lent* to the source for a call (and for as long as the residuals live), and *given* to the
destination for good. What is given is exclusively owned or copied when either side writes in place. What is lent
to a side that might write to it or keep it is copied until the function has shown that it does neither (`Loan`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from polybridge.core import dlpack
from polybridge.core.backend import Backend, Rows
from polybridge.core.errors import MutationError, UnsupportedTensorError
from polybridge.core.specs import SUPPORTED, dtype

Tensor = Any
CopyPolicy = Literal["auto"] | bool


@dataclass(eq=False)  # told apart by identity: contexts may be nested
class Crossings:
    """How many tensors crossed between frameworks, and what was copied for it.

    Attributes:
        crossings: tensors that moved.
        copies: copies made of them.
        bytes_copied: bytes of these copies.
    """

    crossings: int = 0
    copies: int = 0
    bytes_copied: int = 0


_counters: list[Crossings] = []


@contextlib.contextmanager
def count_crossings() -> Iterator[Crossings]:
    """Count the tensors that cross, on any thread, while the context is open."""
    counter = Crossings()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@dataclass(frozen=True)
class Exchange:
    """The way from one backend to the other and back, under one copy policy.

    Args:
        dest: the caller's backend.
        source: the function's backend.
        copy: "auto" copies where sharing is not safe, True copies always, False never (the caller's promise).
        fleeting: whether the caller's memory lasts for the call only; it is given NumPy views, and copies them at once.
        sparse: whether the caller takes gradients as rows.
    """

    dest: Backend
    source: Backend
    copy: CopyPolicy = "auto"
    fleeting: bool = False
    sparse: bool = False

    @property
    def by_dlpack(self) -> bool:
        """Whether tensors cross by DLPack, and not as NumPy arrays."""
        return self.dest.dlpack and self.source.dlpack

    @functools.cached_property
    def _is_copied(self) -> bool | None:
        """Whether what is given is a copy; None where that depends on who else refers to it."""
        if self.copy == "auto":
            return None if self.source.writes or self.dest.writes else False
        return self.copy

    # How most tensors are given: out of the source in a capsule, or as an array where memory is fleeting.

    @functools.cached_property
    def _reference(self) -> Callable[[Tensor], Tensor] | None:
        return self.source.reference if self.source.writes and not self.fleeting else None

    @functools.cached_property
    def _export(self) -> Callable[[Tensor], Any] | None:
        if self.fleeting:
            return self.source.to_numpy
        if not self.by_dlpack or self._is_copied:
            return None
        return self.source.release if self._is_copied is None else self.source.export

    @functools.cached_property
    def _adopt(self) -> Callable[[Any], Tensor | None]:
        return np.asarray if self.fleeting else _adopting(self.dest)

    def give(self, tensors: list[Tensor | None], call: str, name: Callable[[int], str]) -> list[Tensor | None]:
        """Return tensors of the source for the caller to keep.

        Args:
            tensors: of the source, or rows of such. The list is emptied on the way: of what is still referenced from
                there nobody could prove that it is free.
            call: how messages name the function.
            name: how they name one of the tensors.

        Raises:
            UnsupportedTensorError: one of them has no form that can cross.
        """
        reference, export, adopt = self._reference, self._export, self._adopt
        given: list[Tensor | None] = []
        tensors.reverse()
        while tensors:
            tensor = tensors.pop()
            if isinstance(tensor, Rows):
                tensor = self._rows(tensor, call, name(len(given)))
            elif tensor is not None:
                try:
                    if reference is not None:
                        tensor = reference(tensor)  # who still holds the old object can be seen at the new one
                    exported = None if export is None or _counters else export(tensor)
                    adopted = None if exported is None else adopt(exported)
                    tensor = self._given(tensor) if adopted is None else adopted
                except UnsupportedTensorError as error:
                    raise error.at(call, name(len(given))) from None
            given.append(tensor)
        return given

    def _rows(self, rows: Rows, call: str, name: str) -> Tensor:
        indices, values = self.give([rows.indices, rows.values], call, lambda _: name)
        return self.dest.from_rows(Rows(indices, values, rows.shape))

    def _given(self, tensor: Tensor) -> Tensor:
        """Give a tensor that has to be looked at, or copied, or counted."""
        if self.fleeting:
            if _counters:
                _count(tensor, self.source, copied=self.source.dense(tensor) is not tensor)
            return self.source.to_numpy(tensor)
        is_copied = self._is_copied
        if is_copied is None:
            is_copied = not self.source.owns(tensor)
        return move(tensor, self.source, self.dest, own=is_copied)

    def copies(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return copies of the caller's tensors, to be lent where nobody would notice that the caller writes to his."""
        return [None if x is None else _copied(self.dest, x) for x in tensors]

    def loan(self) -> Loan:
        """Return a fresh record of what one function does with the tensors that it is lent."""
        shares = self.copy == "auto" and (self.source.writes or self.dest.writes)
        # Without DLPack what is lent is a copy already, but autograd refuses writes to it: it is the leaf of its graph.
        matters = self.by_dlpack or self.source.counts_writes
        return Loan(self, guarding=matters and (shares or self.copy is True))


class Loan:
    """Lends a function its inputs, on copies until it has shown that it neither writes to them nor keeps them.

    A function of a framework that counts writes gets copies that its own derivative passes through, so that it
    may write to them; any other gets copies that the caller cannot reach. Once every copy of the first call has come
    back untouched and unreferenced, the function is lent the caller's memory itself, and is watched.

    Attributes:
        lend: returns tensors in the source's framework, and None for None.
        guarding: whether what it lends are copies.
        watching: whether `run` has anything to do.
    """

    __slots__ = (
        "_carry",
        "_exchange",
        "_inside",
        "_own",
        "_probes",
        "_residual",
        "_spoiled",
        "guarding",
        "lend",
        "watching",
    )

    def __init__(self, exchange: Exchange, guarding: bool) -> None:
        """Start in mistrust where memory could be shared with somebody who writes."""
        self._exchange = exchange
        self.watching = exchange.source.counts_writes and exchange.copy is not False
        self._inside = guarding and exchange.source.counts_writes
        # Without DLPack nobody watches, and memory that does not last could be kept.
        self._own = exchange.fleeting or (not exchange.by_dlpack and exchange.copy is not False)
        keeping = not self._own and exchange.by_dlpack and not exchange.source.writes
        self._carry = Carry(exchange.dest, exchange.source, self._own, keeping)
        self._guard(guarding)
        self._spoiled = exchange.copy is True
        self._probes: list[Tensor] | None = None
        self._residual: weakref.ref[Any] | None = None

    def _guard(self, guarding: bool) -> None:
        self.guarding = guarding
        self.lend: Callable[[Sequence[Tensor | None]], list[Tensor | None]]
        self.lend = self._lend_copies if guarding else self._carry

    def _lend_copies(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        self._reconsider()
        if not self.guarding or self._inside:
            return self._carry(tensors)
        dest, source = self._exchange.dest, self._exchange.source
        copies = [None if x is None else _copied(dest, dest.dense(x)) for x in tensors]
        self._keep(copies)
        return [None if x is None else move(x, dest, source, own=False) for x in copies]

    def run(
        self,
        fn: Callable[[Sequence[Tensor | None]], Any],
        lent: Sequence[Tensor | None],
        call: str,
        name: Callable[[int], str],
    ) -> Any:
        """Return `fn(lent)`, on differentiable copies or watched.

        Args:
            fn: reads the tensors that it is lent.
            lent: from `lend`.
            call: how messages name the function.
            name: how they name one of the tensors.

        Raises:
            MutationError: the function wrote to memory that it had been trusted with.
        """
        if not self.watching:
            return fn(lent)
        source = self._exchange.source
        if self._own and not self.guarding:  # what was lent is nobody else's
            try:
                return fn(lent)
            except Exception as error:
                if source.is_refused_write(error):
                    self._distrust()
                    raise MutationError.refused(call, error) from error
                raise
        handed = [None if x is None else _copied(source, x) for x in lent] if self.guarding else lent
        before = _versions(handed, source.version)
        try:
            result = fn(handed)
        except Exception as error:
            if not self.guarding and source.is_refused_write(error):
                self._distrust()
                raise MutationError.refused(call, error) from error
            raise
        after = _versions(handed, source.version)
        written = [] if after == before else [i for i, version in enumerate(after) if version != before[i]]
        if not self.guarding:
            if written:
                self._distrust()
                raise MutationError.written(call, name(written[0]))
        elif self._probes is None and not self._spoiled:
            # a write may go past the version counter
            if written or not all(a is None or source.same(a, b) for a, b in zip(lent, handed, strict=True)):
                self._spoiled = True
            elif self._own:  # what was lent was nobody else's, so that the function may keep it
                self._guard(False)
            else:
                self._keep(handed)
        return result

    def _distrust(self) -> None:
        self._inside = self._spoiled = True
        self._guard(True)

    def until(self, residual: Any) -> None:
        """Wait for the death of the first call's residual before judging whether the function has let go."""
        if self._probes is not None and self._residual is None:
            self._residual = weakref.ref(residual)

    def _keep(self, copies: Sequence[Tensor | None]) -> None:
        """Keep the copies of the first call, to see later whether the function has let go of them."""
        if self._probes is None and not self._spoiled and all(x is not None for x in copies):
            prober = self._prober
            self._probes = [prober.reference(x) for x in copies]

    def _reconsider(self) -> None:
        """Trust the function if its first copies have come back, and never if it keeps them."""
        probes = self._probes  # another thread may be here too
        if probes is None or (self._residual is not None and self._residual() is not None):
            return
        if all(map(self._prober.owns, probes)):
            self._guard(False)
        else:
            self._spoiled = True
        self._probes = None

    @property
    def _prober(self) -> Backend:
        return self._exchange.source if self._inside else self._exchange.dest


def _versions(tensors: Sequence[Tensor | None], version: Callable[[Tensor], int]) -> list[int | None]:
    found: list[int | None] = []
    for x in tensors:
        found.append(None if x is None else version(x))
    return found


class _Copy:
    """A copy of a weight in the layout that the other side needs: one a change of the weight, not one a call."""

    __slots__ = ("copy", "version", "weight")

    def __init__(self, weight: Tensor, version: int, copy: Tensor) -> None:
        self.version, self.copy = version, copy
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _copies.pop(key, None))


_COPIES = 4096  # weights, of which few need a copy: those that are transposed, or views of a flat buffer
_copies: dict[int, _Copy] = {}  # by the id of a weight


def _kept(weight: Tensor, origin: Backend) -> Tensor | None:
    """Return the copy of a weight that is still right, if there is one.

    Writes may go past the version of a weight (torch's `.data`), so the copy is compared before it is used again.
    """
    kept = _copies.get(id(weight))
    if kept is None or kept.weight() is not weight:
        return None
    if kept.version == origin.version(weight) and _is_like(kept.copy, weight, origin):
        return kept.copy
    _copies.pop(id(weight), None)
    return None


def _keep(weight: Tensor, origin: Backend, copy: Tensor) -> None:
    if len(_copies) < _COPIES and origin.lasts(weight):
        _copies[id(weight)] = _Copy(weight, origin.version(weight), copy)


def _is_like(copy: Tensor, tensor: Tensor, backend: Backend) -> bool:
    return backend.spec(copy) == backend.spec(tensor) and backend.same(copy, tensor)


class Carry:
    """Lends tensors of one backend to another: their own memory where that can be.

    Args:
        origin: the backend of the tensors.
        target: the backend of the results.
        owns: whether the results are copies.
        keeps: whether copies of weights are kept; the target must not write.
    """

    __slots__ = ("_adopt", "_export", "_keeps", "_origin", "_owns", "_target")

    def __init__(self, origin: Backend, target: Backend, owns: bool = False, keeps: bool = False) -> None:
        """Have at hand what a call asks for."""
        self._origin, self._target, self._owns, self._keeps = origin, target, owns, keeps
        self._export: Callable[[Tensor], Any] | None = None
        self._adopt: Callable[[Any], Tensor | None] = target.from_numpy
        if origin.dlpack and target.dlpack:
            self._export, self._adopt = (None if owns else origin.export), _adopting(target)
        elif owns:
            self._export = _array_of(origin)

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors in the target's framework; None stays None."""
        export, adopt = self._export, self._adopt
        carried: list[Tensor | None] = []
        for tensor in tensors:
            adopted = None
            if tensor is not None and export is not None and not _counters and not (_copies and id(tensor) in _copies):
                exported = export(tensor)
                adopted = None if exported is None else adopt(exported)
            carried.append(self._moved(tensor) if adopted is None else adopted)
        return carried

    def _moved(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        origin, target = self._origin, self._target
        if self._keeps and _copies:
            kept = _kept(tensor, origin)
            tensor = tensor if kept is None else kept
        moved, copy = _moved(tensor, origin.dense(tensor), origin, target, self._owns)
        if self._keeps and copy is not None:
            _keep(tensor, origin, copy)
        return moved


def _array_of(origin: Backend) -> Callable[[Tensor], Any]:
    """Return a function that returns the values of a tensor that is dense as it is; None of any other."""
    dense, to_numpy = origin.dense, origin.to_numpy
    return lambda tensor: to_numpy(tensor) if dense(tensor) is tensor else None


def _adopting(target: Backend) -> Callable[[Any], Tensor | None]:
    """Return `target.from_dlpack`; for memory that is not aligned as the target needs it, it returns None."""
    adopt, alignment = target.from_dlpack, target.alignment
    if alignment == 1:
        return adopt
    return lambda capsule: None if dlpack.address(capsule) % alignment else adopt(capsule)


def move(tensor: Tensor, origin: Backend, target: Backend, own: bool) -> Tensor:
    """Return a tensor of `origin` in the target's framework.

    Args:
        tensor: what moves; the result shares its memory where that is possible.
        origin: the tensor's backend.
        target: the backend of the result.
        own: whether the result must not share the tensor's memory.

    Raises:
        UnsupportedTensorError: the tensor has no form that can cross.
    """
    return _moved(tensor, origin.dense(tensor), origin, target, own)[0]


def _moved(tensor: Tensor, dense: Tensor, origin: Backend, target: Backend, own: bool) -> tuple[Tensor, Tensor | None]:
    """Return a tensor, of which `dense` has the values, in the target's framework.

    Beside it comes the copy in the origin that it shares its memory with, if there is one for its layout.
    """
    made = None if dense is tensor else dense
    if _counters:
        _count(dense, origin, made is not None)
    if not (origin.dlpack and target.dlpack):
        array = origin.to_numpy(dense)
        adopted = None if own and made is None else target.adopt(array)
        if adopted is not None:
            return adopted, made
        if _counters:
            _count_copy(dense, origin)
        return target.from_numpy(array), None
    copies = own and made is None
    if copies and not target.writes:
        dense = _copied(origin, dense)
    capsule = origin.to_dlpack(dense)
    if target.alignment > 1 and dlpack.address(capsule) % target.alignment:
        made = dense = _copied(origin, dense)
        capsule = origin.to_dlpack(dense)
        if dlpack.address(capsule) % target.alignment:  # this origin does not allocate aligned memory
            return target.from_numpy(origin.to_numpy(dense)), None
    moved = target.from_dlpack(capsule)
    return (_copied(target, moved) if copies and target.writes else moved), made


def widened(backend: Backend, tensor: Tensor | None, dtype_name: str | None) -> Tensor | None:
    """Return a tensor of a backend with the dtype that it had before the other side narrowed it."""
    if tensor is None or dtype_name is None or backend.dtype_name(tensor) == dtype_name:
        return tensor
    return backend.from_numpy(backend.to_numpy(tensor).astype(dtype(dtype_name)))


def array_to(target: Backend, array: Any, call: str, path: str) -> Tensor:
    """Return a NumPy array or scalar as a tensor of `target`.

    Raises:
        UnsupportedTensorError: an array of strings, objects or another dtype that is not a tensor's.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedTensorError("a masked array").at(call, path)
    array = np.asarray(array)
    if array.dtype.name not in SUPPORTED:
        raise UnsupportedTensorError(f"NumPy dtype {array.dtype.name}").at(call, path)
    return target.from_numpy(array)


def _copied(backend: Backend, tensor: Tensor) -> Tensor:
    _count_copy(tensor, backend)
    return backend.copy(tensor)


def _count(tensor: Tensor, backend: Backend, copied: bool) -> None:
    for counter in _counters:
        counter.crossings += 1
    if copied:
        _count_copy(tensor, backend)


def _count_copy(tensor: Tensor, backend: Backend) -> None:
    if not _counters:
        return
    spec = backend.spec(tensor)
    size = int(np.prod([n or 0 for n in spec.shape or ()], dtype=np.int64)) * dtype(spec.dtype).itemsize
    for counter in _counters:
        counter.copies += 1
        counter.bytes_copied += size
