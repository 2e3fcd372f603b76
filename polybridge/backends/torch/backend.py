"""torch as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from polybridge.backends.torch import compiled, convert, native, source
from polybridge.core.backend import Backend, Rows
from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results

Tensor = torch.Tensor


class TorchBackend(Backend):
    """torch writes in place, counts its writes, and holds its residuals in a graph of its own."""

    name = "torch"
    aliases = ("pytorch",)
    writes = True
    counts_writes = True
    takes_rows = False
    dlpack = True

    to_numpy = staticmethod(convert.to_numpy)
    from_numpy = staticmethod(convert.from_numpy)
    vjp = staticmethod(source.vjp)
    wrap_as_native = staticmethod(native.wrap_as_native)
    decorate = staticmethod(compiled.decorate)
    spec = staticmethod(convert.spec)
    dtype_name = staticmethod(convert.dtype_name)
    is_differentiable = staticmethod(convert.is_differentiable)
    dense = staticmethod(convert.dense)
    export = staticmethod(convert.export)
    to_dlpack = staticmethod(convert.to_dlpack)
    from_dlpack = staticmethod(convert.from_dlpack)
    adopt = staticmethod(convert.adopt)
    copy = staticmethod(convert.copy)
    owns = staticmethod(convert.owns)
    reference = staticmethod(convert.reference)
    is_refused_write = staticmethod(source.is_refused_write)
    version = staticmethod(attrgetter("_version"))
    same = staticmethod(convert.same)
    vmap = staticmethod(source.vmap)
    run = staticmethod(source.run)
    around = staticmethod(source.around)
    differentiating = staticmethod(torch.is_grad_enabled)
    randomness = staticmethod(source.randomness)
    without_randomness = staticmethod(source.without_randomness)
    modes = staticmethod(source.modes)
    state = staticmethod(source.state)
    placeholders = staticmethod(source.placeholders)
    needs_values = staticmethod(source.needs_values)

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor or a parameter."""
        return isinstance(value, Tensor)

    def is_composite(self, value: Any) -> bool:
        """Whether torch's functions take it for a tensor, such as a proxy of `torch.fx` or a tree of tensors."""
        return not isinstance(value, type) and hasattr(type(value), "__torch_function__")

    def check_detached(self, tensor: Tensor) -> None:
        """Refuse a tensor with a history."""
        if tensor.grad_fn is not None and torch.is_grad_enabled():
            raise UnsupportedTensorError("a tensor with gradient history, which would be lost; call .detach() first")

    def from_rows(self, rows: Rows) -> torch.Tensor:
        """Return a sparse tensor in coordinate format."""
        return torch.sparse_coo_tensor(
            rows.indices[None], rows.values, rows.shape, device=rows.values.device, check_invariants=False
        )

    def lasts(self, tensor: Tensor) -> bool:
        """Whether it is a parameter."""
        return isinstance(tensor, torch.nn.Parameter)

    def select(self, tensor: Tensor, axis: int, index: int) -> Tensor:
        """Return a view of an example."""
        return tensor.select(axis, index)

    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Return the examples along a new axis."""
        return torch.stack(list(tensors), axis)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Return an evaluator that records."""
        return source.RecordingEvaluator(self, run, run_on_copies)
