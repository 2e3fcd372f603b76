"""Python inside TensorFlow graphs, differentiated and vectorised as the caller says."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, ending
from polybridge.core.errors import CompilationError, remember

_thread = threading.local()
_numbers = itertools.count(1)
_eager_lock = threading.RLock()  # finalizers may come here, as may handlers of signals
_eager_threads = 0
_eager_before: bool | None = None  # what the switch is to be again; None where it was not touched


def inside() -> bool:
    """Whether this thread is in a callback of a running graph."""
    return getattr(_thread, "depth", 0) > 0


Gradient = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""From inputs, results and the results' cotangents to the inputs' cotangents, all of a graph."""


def call(
    name: str,
    fn: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    specs: Sequence[Any],
    gradient: Gradient,
    vectorise: Callable[[_private.Batch], Sequence[Any]],
) -> list[Any]:
    """Add a call of `fn` to the graph being built.

    Args:
        name: how messages name the call.
        fn: takes eager tensors and returns one per spec.
        inputs: graph tensors.
        specs: `tf.TensorSpec` of the results; their shapes are set, and are the caller's promise.
        gradient: of the call.
        vectorise: adds the call for a batch, to a graph that `tf.vectorized_map` or a Jacobian builds.
    """

    def entered(*args: Any) -> Sequence[Any]:
        depth = _thread.__dict__.get("depth", 0)
        if not depth:
            ending.enter(name)
        _thread.depth = depth + 1
        try:
            return fn(*args)
        except StopIteration as error:  # TensorFlow takes it for the end of a sequence, and `fit` for that of its data
            raise RuntimeError(f"`{name}` raised StopIteration: {error}") from error
        finally:
            _thread.depth = depth
            if not depth:
                ending.leave()

    ending.watch()
    # Two ways lead to the gradient. `tf.gradients`, control flow and `tf.vectorized_map` read the operation's
    # attribute; tapes and forward accumulators read what is recorded, and shall see one operation.
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, tf.__internal__.FuncGraph):  # while tapes see it, also for what is made of the operation
        inputs = [graph.capture(x) for x in inputs]
    override = graph.gradient_override_map({"EagerPyFunc": _registered(name)})
    with _private.stop_recording(), override:
        results = _private.py_function(entered, inputs, [spec.dtype for spec in specs], gradient, vectorise)
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    _private.record(results, list(inputs), lambda *cts: gradient(inputs, results, cts))
    return list(results)


@functools.cache  # TensorFlow forgets no gradient: one for each call would keep the residuals that it refers to
def _registered(name: str) -> str:
    """Return the name of a gradient that finds that of an operation."""
    registered = f"Polybridge{next(_numbers)}"

    def of_operation(op: Any, *cts: Any) -> Sequence[Any]:
        if op is None:  # `tf.saved_model.save` asks for a gradient that needs no operation
            error = CompilationError.in_saved_model(name)
            remember(error)  # TensorFlow raises a ValueError of its own
            raise error
        return _private.gradient_of(op)(op.inputs, op.outputs, cts)

    tf.RegisterGradient(registered)(_private.not_for_autograph(of_operation))
    return registered


def without_gradient(inputs: Sequence[Any], results: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
    """Say that no input influences the results."""
    return [None] * len(inputs)


@contextlib.contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Run `tf.function`s as plain Python for as long as any thread is here.

    A graph that is called in a callback waits for a thread of the pool in which the callbacks themselves run, and hangs
    when they fill it. TensorFlow's switch is one for the whole process, hence the count.

    Each line may be interrupted by a whole turn of the same thread, after which it has to be right still.
    """
    global _eager_threads, _eager_before
    with _eager_lock:
        found = tf.config.functions_run_eagerly()
        _eager_threads += 1
        if _eager_before is None:
            _eager_before = found
        tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        with _eager_lock:
            _eager_threads -= 1
            before = _eager_before
            if not _eager_threads and before is not None:
                tf.config.run_functions_eagerly(before)
                _eager_before = None
