"""JAX as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polybridge.backends.jax import convert, native, source, trees
from polybridge.core.backend import Backend, Context, Pullback
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import TensorSpec

Tensor = Any


class JaxBackend(Backend):
    """JAX never writes in place, compiles pure functions, and has 64 bits only where they are switched on."""

    name = "jax"
    writes = False
    dlpack = True

    def is_tensor(self, value: Any) -> bool:
        """Whether it is an array, concrete or traced."""
        return convert.is_tensor(value)

    def is_composite(self, value: Any) -> bool:
        """Whether it is a mutable reference, or a tree to JAX alone, such as a sparse array."""
        return convert.is_composite(value)

    def is_tree(self, value: Any) -> bool:
        """Whether it is a node of trees."""
        return convert.is_tree(value)

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return a view of the values."""
        return convert.to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return a copy of the values."""
        return convert.from_numpy(array)

    def parts(self, tree: Any) -> tuple[dict[str, Tensor], Callable[[Mapping[str, Tensor]], Any]]:
        """Return the arrays of what is a tree to JAX."""
        return trees.parts(tree)

    def vjp(self, fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
        """Evaluate under `jax.vjp`."""
        return source.vjp(fn, primals)

    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return a function of JAX arrays."""
        return native.wrap_as_native(relay)

    def spec(self, tensor: Tensor) -> TensorSpec:
        """Return shape and dtype."""
        return convert.spec(tensor)

    def is_differentiable(self, tensor: Tensor) -> bool:
        """Whether it is floating or complex."""
        return convert.is_differentiable(tensor)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return a row-major array on one device."""
        return convert.dense(tensor)

    def to_dlpack(self, tensor: Tensor) -> Any:
        """Return a capsule."""
        return convert.to_dlpack(tensor)

    def from_dlpack(self, capsule: Any) -> Tensor:
        """Return an array on a capsule's memory, unless that has to be narrowed."""
        return convert.from_dlpack(capsule)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return convert.copy(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Whether compiled code has made the memory."""
        return convert.owns(tensor)

    def narrows(self) -> bool:
        """Whether 64 bits are off."""
        return convert.narrows()

    def vmap(self, fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
        """Return `jax.vmap` of it."""
        return source.vmap(fn, axes)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Return an evaluator that compiles."""
        return source.CompilingEvaluator(self, run, run_on_copies)

    def started(self) -> bool:
        """Whether a client exists."""
        return convert.started()

    def state(self) -> Context:
        """Capture the precision, the default device and what else `jax.config` keeps per thread."""
        return source.state()
