"""What is judged, by what, and how a broken law reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from polybridge.core.backend import Backend, Tensor
from polybridge.core.specs import SUPPORTED, TensorSpec, dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Example:
    """A function of the framework, and a point at which it is smooth.

    Args:
        fn: takes one tensor for each primal; returns a tensor or a sequence of tensors, floating or complex.
        primals: floating or complex arrays; float64 makes the comparison with finite differences sharp.
        name: what messages call it.
    """

    fn: Callable[..., Any]
    primals: Sequence[Array]
    name: str = "an example"

    def run(self, *primals: Tensor) -> list[Tensor]:
        """Return the function's results as a list."""
        found = self.fn(*primals)
        return list(found) if isinstance(found, (list, tuple)) else [found]


@dataclass(frozen=True)
class Subject:
    """A backend and what its laws are checked on.

    Args:
        backend: the backend.
        examples: functions for the laws of derivatives; without any, these hold trivially.
        dtypes: the NumPy names of the dtypes that the framework holds.
        order: the highest order of derivatives to check.
        write: writes to a tensor in place, other numbers than it has; needed where the backend counts writes.
    """

    backend: Backend
    examples: Sequence[Example] = ()
    dtypes: Sequence[str] = field(default_factory=lambda: sorted(SUPPORTED))
    order: int = 3
    write: Callable[[Tensor], Any] | None = None

    def arrays(self) -> Iterator[Array]:
        """Yield an array of every dtype and kind of shape, with the numbers that are easily lost."""
        for name in self.dtypes:
            for shape in _SHAPES:
                yield np.resize(_numbers(name), shape)

    def tensors(self) -> Iterator[tuple[Array, Tensor]]:
        """Yield each array and a tensor of it."""
        return ((array, self.backend.from_numpy(array)) for array in self.arrays())

    def given(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return arrays as tensors."""
        return [self.backend.from_numpy(array) for array in arrays]

    def values(self, tensors: Sequence[Tensor]) -> list[Array]:
        """Return copies of what tensors hold."""
        return [np.array(self.backend.to_numpy(x)) for x in tensors]


class LawError(AssertionError):
    """A backend breaks a law of the contract."""

    @classmethod
    def broken(cls, backend: Backend, check: Callable[..., Any], error: Exception) -> LawError:
        """Name the backend, the law and what was found."""
        statement = " ".join((check.__doc__ or "").split())
        return cls(f"The backend {backend.name!r} breaks `{check.__name__}`. The law: {statement} Found: {said(error)}")


def law(check: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Make a law of a check. Its docstring states the law; whatever it raises becomes a `LawError` that quotes it."""

    @functools.wraps(check)
    def checked(subject: Subject) -> None:
        try:
            check(subject)
        except Exception as error:
            raise LawError.broken(subject.backend, check, error) from error

    return checked


def said(error: Exception) -> str:
    """Return what was found: the message of a broken law, any other exception with its type."""
    return str(error) if isinstance(error, LawError) else f"{type(error).__name__}: {error}"


def require(condition: object, what: str) -> None:
    """Raise a `LawError` unless the condition holds."""
    if not condition:
        raise LawError(what)


def require_same(found: Array, expected: Array, what: str) -> None:
    """Ask for equal shape, dtype and bits; byte order may differ."""
    spec, promised = (TensorSpec(x.shape, x.dtype.name) for x in (found, expected))
    require(spec == promised, f"{what} is {spec} instead of {promised}.")
    bits, promised_bits = (np.array(x, dtype(spec.dtype)).tobytes() for x in (found, expected))
    require(bits == promised_bits, f"{what} of {spec} holds {found!r} instead of {expected!r}.")


def require_close(found: Array | None, expected: Array | None, what: str) -> None:
    """Ask for equal shape and dtype and nearly equal numbers; None is close to zeros."""
    if found is None or expected is None:
        other = expected if found is None else found
        require(other is None or not np.any(other), f"{what} is {found!r} instead of {expected!r}.")
        return
    spec, promised = (TensorSpec(x.shape, x.dtype.name) for x in (found, expected))
    require(spec == promised, f"{what} is {spec} instead of {promised}.")
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    scale = 1.0 + float(np.max(np.abs(expected.astype(wide)), initial=0.0))
    difference = float(np.max(np.abs(found.astype(wide) - expected.astype(wide)), initial=0.0))
    require(difference <= tolerance(expected) * scale, f"{what} is {found!r} instead of {expected!r}.")


def tolerance(array: Array) -> float:
    """Return how far two ways of computing the same numbers may lie apart, relative to their size."""
    if array.dtype.kind in "biu":
        return 0.0
    return 50 * float(_finfo(array.dtype).eps) ** 0.5


def _finfo(kind: np.dtype[Any]) -> Any:
    """Return the limits of a floating dtype, or of the parts of a complex one."""
    return ml_dtypes.finfo(np.zeros((), kind).real.dtype)  # type: ignore[no-untyped-call]


_SHAPES = ((), (1,), (0,), (9,), (2, 3), (1, 3, 1), (2, 0, 3))


def _numbers(name: str) -> Array:
    """Return numbers of a dtype: signed zeros, infinities, nan, the smallest and the largest."""
    kind = dtype(name)
    if name == "bool":
        return np.array([True, False])
    if kind.kind in "iu":
        return np.array([0, 1, np.iinfo(kind).min, np.iinfo(kind).max, 2], kind)
    info = _finfo(kind)
    found = np.array([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf, info.smallest_subnormal, info.max, -2.0], kind)
    if kind.kind == "c":
        found.imag = found.real[::-1]
    return found
