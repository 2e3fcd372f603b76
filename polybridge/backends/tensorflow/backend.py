"""TensorFlow as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polybridge.backends.tensorflow import _private, convert, native, session, source
from polybridge.core.backend import Backend, Context, Pullback, Rows
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import TensorSpec

Tensor = Any


class TensorFlowBackend(Backend):
    """TensorFlow never writes in place, and aborts on memory that is not aligned."""

    name = "tensorflow"
    aliases = ("tf",)
    writes = False
    dlpack = True
    alignment = convert.ALIGNMENT
    takes_rows = True

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor or a variable."""
        return convert.is_tensor(value)

    def is_composite(self, value: Any) -> bool:
        """Whether it is sparse, ragged, a tensor array or symbolic in Keras."""
        return convert.is_composite(value)

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return the values."""
        return convert.to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return a copy of the values."""
        with source.eagerly():  # a value, also while a graph is being built around the call
            return convert.from_numpy(array)

    def vjp(self, fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
        """Evaluate under a tape."""
        return source.vjp(fn, primals)

    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return a function with a custom gradient."""
        return native.wrap_as_native(relay)

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep AutoGraph from rewriting what is not TensorFlow code."""
        return _private.not_for_autograph(function)

    def spec(self, tensor: Any) -> TensorSpec:
        """Return shape and dtype."""
        return convert.spec(tensor)

    def is_differentiable(self, tensor: Any) -> bool:
        """Whether it is floating or complex."""
        return convert.is_differentiable(tensor)

    def dense(self, tensor: Any) -> Tensor:
        """Return a tensor, of a variable its value."""
        return convert.dense(tensor)

    def to_dlpack(self, tensor: Tensor) -> Any:
        """Return a capsule."""
        return convert.to_dlpack(tensor)

    def from_rows(self, rows: Rows) -> Any:
        """Return `tf.IndexedSlices`."""
        return tf.IndexedSlices(rows.values, rows.indices, tf.constant(rows.shape, tf.int64))

    def from_dlpack(self, capsule: Any) -> Tensor:
        """Return a tensor on a capsule's memory."""
        if _private.executing_eagerly():
            return convert.from_dlpack(capsule)
        with source.eagerly():
            return convert.from_dlpack(capsule)

    def vmap(self, fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
        """Return `tf.vectorized_map` of it."""
        return source.vmap(fn, axes)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Plan by tracing."""
        return source.Planning(self, run, run_on_copies)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()` eagerly."""
        return source.run(fn)

    def placeholders(self, specs: Sequence[TensorSpec]) -> tuple[list[Tensor], Context]:
        """Return eager ones, also while a graph is being built around the call."""
        with source.eagerly():
            return super().placeholders(specs)

    def started(self) -> bool:
        """Whether the eager runtime exists."""
        return _private.has_started()

    def graph_function(self, session_: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Return a TensorFlow 1 graph as an eager function; offered to users as `polybridge.tf1.graph_function`."""
        return session.graph_function(session_, inputs, outputs)
