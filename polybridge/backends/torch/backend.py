"""torch as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from polybridge.backends.torch import compiled, convert, native, source
from polybridge.core.backend import Backend, Context, Pullback, Rows
from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import TensorSpec

Tensor = torch.Tensor


class TorchBackend(Backend):
    """torch writes in place, counts its writes, and holds its residuals in a graph of its own."""

    name = "torch"
    aliases = ("pytorch",)
    writes = True
    counts_writes = True
    takes_rows = False
    dlpack = True

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor or a parameter."""
        return isinstance(value, Tensor)

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return a view of the values."""
        return convert.to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return a copy of the values."""
        return convert.from_numpy(array)

    def vjp(self, fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
        """Evaluate under autograd."""
        return source.vjp(fn, primals)

    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return an autograd function."""
        return native.wrap_as_native(relay)

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the compiler a branch of its own."""
        return compiled.decorate(function)

    def spec(self, tensor: Tensor) -> TensorSpec:
        """Return shape and dtype."""
        return convert.spec(tensor)

    def dtype_name(self, tensor: Tensor) -> str:
        """Return the name of the dtype."""
        return convert.dtype_name(tensor)

    def is_differentiable(self, tensor: Tensor) -> bool:
        """Whether it is floating or complex."""
        return convert.is_differentiable(tensor)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return a row-major tensor without lazy bits."""
        return convert.dense(tensor)

    def check_detached(self, tensor: Tensor) -> None:
        """Refuse a tensor with a history."""
        if tensor.grad_fn is not None and torch.is_grad_enabled():
            raise UnsupportedTensorError("a tensor with gradient history, which would be lost; call .detach() first")

    def to_dlpack(self, tensor: Tensor) -> Any:
        """Return a capsule."""
        return convert.to_dlpack(tensor)

    def from_rows(self, rows: Rows) -> torch.Tensor:
        """Return a sparse tensor in coordinate format."""
        return torch.sparse_coo_tensor(rows.indices[None], rows.values, rows.shape, check_invariants=False)

    def from_dlpack(self, capsule: Any) -> Tensor:
        """Return a tensor on a capsule's memory."""
        tensor: Tensor = convert.from_dlpack(capsule)
        return tensor

    def adopt(self, array: np.ndarray[Any, Any]) -> Tensor | None:
        """Return a tensor on an array's memory."""
        return convert.adopt(array)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a differentiable copy."""
        return convert.copy(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the storage has one user."""
        return convert.owns(tensor)

    def reference(self, tensor: Tensor) -> Tensor:
        """Return another tensor on the same storage."""
        return tensor.detach()

    def version(self, tensor: Tensor) -> int:
        """Return the version counter."""
        return tensor._version

    def is_refused_write(self, error: Exception) -> bool:
        """Whether autograd has refused it."""
        return source.is_refused_write(error)

    def lasts(self, tensor: Tensor) -> bool:
        """Whether it is a parameter."""
        return isinstance(tensor, torch.nn.Parameter)

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Compare bytes."""
        return convert.same(a, b)

    def select(self, tensor: Tensor, axis: int, index: int) -> Tensor:
        """Return a view of an example."""
        return tensor.select(axis, index)

    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Return the examples along a new axis."""
        return torch.stack(list(tensors), axis)

    def vmap(self, fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
        """Return `torch.vmap` of it."""
        return source.vmap(fn, axes)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Return an evaluator that records."""
        return source.RecordingEvaluator(self, run, run_on_copies)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()`, outside of inference mode: its tensors do not count writes."""
        return source.run(fn)

    def differentiating(self) -> bool:
        """Whether gradients are on."""
        return torch.is_grad_enabled()

    def randomness(self) -> Context:
        """Capture the generators of all devices."""
        return source.randomness()

    def modes(self) -> tuple[Any, ...]:
        """Return autocast and the default dtype."""
        return source.modes()

    def state(self) -> Context:
        """Capture grad mode, autocast and the default device."""
        return source.state()

    def placeholders(self, specs: Sequence[TensorSpec]) -> tuple[list[Tensor], Context]:
        """Return fake tensors."""
        return source.placeholders(specs)
