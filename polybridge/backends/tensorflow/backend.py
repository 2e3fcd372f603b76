"""TensorFlow as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polybridge.backends.tensorflow import _private, convert, native, session, source
from polybridge.core.backend import Backend, Context, Rows
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results
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

    is_tensor = staticmethod(convert.is_tensor)
    is_composite = staticmethod(convert.is_composite)
    advice = staticmethod(convert.advice)
    to_numpy = staticmethod(convert.to_numpy)
    vjp = staticmethod(source.vjp)
    wrap_as_native = staticmethod(native.wrap_as_native)
    decorate = staticmethod(_private.not_for_autograph)
    spec = staticmethod(convert.spec)
    dtype_name = staticmethod(convert.dtype_name)
    is_differentiable = staticmethod(convert.is_differentiable)
    dense = staticmethod(convert.dense)
    to_dlpack = staticmethod(convert.to_dlpack)
    export = staticmethod(convert.export)
    vmap = staticmethod(source.vmap)
    run = staticmethod(source.run)
    started = staticmethod(_private.has_started)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return a copy of the values."""
        with source.eagerly():  # a value, also while a graph is being built around the call
            return convert.from_numpy(array)

    def from_rows(self, rows: Rows) -> Any:
        """Return `tf.IndexedSlices`."""
        return tf.IndexedSlices(rows.values, rows.indices, tf.constant(rows.shape, tf.int64))

    def from_dlpack(self, capsule: Any) -> Tensor:
        """Return a tensor on a capsule's memory."""
        if _private.executing_eagerly():
            return convert.from_dlpack(capsule)
        with source.eagerly():
            return convert.from_dlpack(capsule)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Plan by tracing."""
        return source.Planning(self, run, run_on_copies)

    def placeholders(self, specs: Sequence[TensorSpec]) -> tuple[list[Tensor], Context]:
        """Return eager ones, also while a graph is being built around the call."""
        with source.eagerly():
            return super().placeholders(specs)

    def graph_function(self, session_: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Return a TensorFlow 1 graph as an eager function; offered to users as `polybridge.tf1.graph_function`."""
        return session.graph_function(session_, inputs, outputs)
