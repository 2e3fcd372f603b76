"""NumPy as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polybridge.backends.numpy import convert, native, source
from polybridge.backends.numpy.convert import Array
from polybridge.core.backend import Backend, Pullback
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import TensorSpec


class NumPyBackend(Backend):
    """NumPy writes in place, does not count its writes, and differentiates nothing.

    It has no DLPack here: NumPy's imports are read-only, its exports refuse read-only arrays, and both lack bfloat16.
    Memory changes hands where it is proved that nothing else refers to it; everything else that crosses is a copy.
    """

    name = "numpy"
    aliases = ("np",)
    writes = True
    derivatives = False

    def is_tensor(self, value: Any) -> bool:
        """Whether it is an array or a NumPy scalar."""
        return convert.is_tensor(value)

    def to_numpy(self, tensor: Array) -> Array:
        """Return the array itself, of a scalar one of no dimensions."""
        return convert.dense(tensor)

    def from_numpy(self, array: Array) -> Array:
        """Return a copy."""
        return convert.from_numpy(array)

    def vjp(self, fn: Callable[..., Sequence[Array]], primals: Sequence[Array]) -> tuple[Sequence[Array], Pullback]:
        """Evaluate; the pullback says that there is none."""
        return source.vjp(fn, primals)

    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return a function of arrays."""
        return native.wrap_as_native(relay)

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add `vjp`, `jvp`, `grad`, `value_and_grad` and `hessian`."""
        return native.decorate(function)

    def spec(self, tensor: Array) -> TensorSpec:
        """Return shape and dtype."""
        return convert.spec(tensor)

    def adopt(self, array: Array) -> Array | None:
        """Return the array itself."""
        return convert.adopt(array)

    def reference(self, tensor: Array) -> Array:
        """Return a view."""
        return convert.reference(tensor)

    def owns(self, tensor: Array) -> bool:
        """Whether nothing else refers to what it is a view of."""
        return convert.owns(tensor)

    def dense(self, tensor: Array) -> Array:
        """Return a plain array."""
        return convert.dense(tensor)
