"""Python inside TensorFlow graphs, and residuals that live exactly as long as a graph keeps a token for them.

A forward callback returns a token beside its results: a small tensor with a number, whose memory is a NumPy buffer
lent through DLPack. TensorFlow drops the buffer with the last reader of the token, the buffer's finalizer then drops
the residual. A graph that is never differentiated has no reader, and leaks nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from polybridge.backends.tensorflow import _private
from polybridge.backends.tensorflow.convert import ALIGNMENT, from_dlpack
from polybridge.core.errors import CompilationError, ResidualError, remember
from polybridge.core.relay import Relay

_thread = threading.local()
_numbers = itertools.count(1)
_eager_lock = threading.Lock()
_eager_threads = 0
_eager_before = False
_residuals: dict[int, tuple[Relay, weakref.ref[Any]]] = {}  # by number, with what waits for the buffer's death


def inside() -> bool:
    """Whether this thread is in a callback of a running graph."""
    return getattr(_thread, "depth", 0) > 0


Gradient = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""From inputs, results and the results' cotangents to the inputs' cotangents, all of a graph."""


def call(
    name: str, fn: Callable[..., Sequence[Any]], inputs: Sequence[Any], specs: Sequence[Any], gradient: Gradient
) -> list[Any]:
    """Add a call of `fn` to the graph being built.

    Args:
        name: how messages name the call.
        fn: takes eager tensors and returns one per spec.
        inputs: graph tensors.
        specs: `tf.TensorSpec` of the results; their shapes are set, and are the caller's promise.
        gradient: of the call.
    """

    def entered(*args: Any) -> Sequence[Any]:
        depth = _thread.__dict__.get("depth", 0)
        _thread.depth = depth + 1
        try:
            return fn(*args)
        finally:
            _thread.depth = depth

    def of_operation(op: Any, *cts: Any) -> Sequence[Any]:
        if op is None:  # `tf.saved_model.save` asks for a gradient that needs no operation
            error = CompilationError.in_saved_model(name)
            remember(error)  # TensorFlow raises a ValueError of its own
            raise error
        return gradient(op.inputs, op.outputs, cts)

    # Two ways lead to the gradient. `tf.gradients`, control flow and `tf.vectorized_map` read the operation's
    # attribute; tapes and forward accumulators read what is recorded, and shall see one operation.
    registered = f"Polybridge{next(_numbers)}"
    tf.RegisterGradient(registered)(_private.not_for_autograph(of_operation))
    override = tf.compat.v1.get_default_graph().gradient_override_map({"EagerPyFunc": registered})
    with _private.stop_recording(), override:
        results = _private.py_function(entered, inputs, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    _private.record(results, list(inputs), lambda *cts: gradient(inputs, results, cts))
    return list(results)


def without_gradient(inputs: Sequence[Any], results: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
    """Say that no input influences the results."""
    return [None] * len(inputs)


@contextlib.contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Run `tf.function`s as plain Python for as long as any thread is here.

    A graph that is called in a callback waits for a thread of the pool in which the callbacks themselves run, and hangs
    when they fill it. TensorFlow's switch is one for the whole process, hence the count.
    """
    global _eager_threads, _eager_before
    with _eager_lock:
        if not _eager_threads:
            _eager_before = tf.config.functions_run_eagerly()
        _eager_threads += 1
        tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        with _eager_lock:
            _eager_threads -= 1
            if not _eager_threads:
                tf.config.run_functions_eagerly(_eager_before)


def keep(back: Relay) -> tf.Tensor:
    """Return a token for a residual, which is dropped when TensorFlow drops the token."""
    number = next(_numbers)
    buffer = np.zeros(1 + 2 * ALIGNMENT // 8, dtype=np.int64).view(_Buffer)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer.data)) % ALIGNMENT // 8
    token = buffer[start : start + 1]
    token[0] = number
    _residuals[number] = back, weakref.ref(buffer, lambda _: _residuals.pop(number, None))
    return from_dlpack(token.__dlpack__())


def kept(token: tf.Tensor) -> Relay:
    """Return the residual of a token."""
    back, _ = _residuals.get(int(token.numpy()[0]), (None, None))
    if back is None:
        raise ResidualError(
            "A gradient was asked for of a wrapped function whose forward is gone: the graph copied polybridge's token "
            "instead of passing it on. Compute the gradient in the loop or function that has the call; inside "
            "`tf.vectorized_map`, use `tf.map_fn` instead."
        )
    return back


class _Buffer(np.ndarray):
    """A plain array that can carry a finalizer."""
