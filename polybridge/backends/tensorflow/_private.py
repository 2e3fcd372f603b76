"""The private names of TensorFlow that polybridge uses, each with its reason (TensorFlow 2.21).

`tests/backends/test_private_apis.py` notices when one of them changes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.impl.api import autograph_artifact
from tensorflow.python.eager import backprop_util, context
from tensorflow.python.eager.context import executing_eagerly as executing_eagerly  # the public one, less a call
from tensorflow.python.eager.imperative_grad import imperative_grad
from tensorflow.python.eager.record import record_operation
from tensorflow.python.eager.record import stop_recording as stop_recording  # no public one stops every tape
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops import control_flow_util, custom_gradient, gen_script_ops, script_ops
from tensorflow.python.ops.parallel_for import pfor

from polybridge.core.threads import PerThread


def is_followed(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape or a forward accumulator watches one of these eager tensors; no public call tells.

    Without it every eager call would be differentiated in case somebody asks.
    """
    return bool(pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors)))


def let_follow(variable: tf.Variable) -> None:
    """Let tapes follow a variable that was made as one that is not trained; TensorFlow decides it for good."""
    for copy in getattr(variable, "values", (variable,)):  # one a device, in a distribution strategy
        copy._trainable = True


_keeps = PerThread(False)


def keeping() -> contextlib.AbstractContextManager[None]:
    """Let `tf.recompute_grad` and `keras.remat` compute nothing again of what is called here, on this thread.

    They would do so in the backward, when variables have other values again than those that this call is lent.
    """
    return _keeps.set(True)


def _kept(decorator: Callable[..., Any]) -> Callable[..., Any]:
    def decorated(f: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if _keeps.value and getattr(f, "__qualname__", "").startswith("recompute_grad.<locals>"):
            return inspect.getclosurevars(f).nonlocals["f"](*args, **kwargs)
        return decorator(f, args, kwargs)

    return decorated


custom_gradient._eager_mode_decorator = _kept(custom_gradient._eager_mode_decorator)
custom_gradient._graph_mode_decorator = _kept(custom_gradient._graph_mode_decorator)


def is_taped() -> bool:
    """Whether any tape records on this thread."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def is_alone() -> bool:
    """Whether nobody records on this thread, and nobody has stopped recording."""
    return bool(pywrap_tfe.TFE_Py_TapeSetIsEmpty()) and not pywrap_tfe.TFE_Py_TapeSetIsStopped()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Let tapes that are opened here record what happens here.

    A forward accumulator differentiates a gradient function by a tape of its own; while it does, no other tape records
    (TensorFlow 2.21). Its own functions get out of it this way. `tf.recompute_grad` stops all tapes of the thread.
    """
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    pywrap_tfe.TFE_Py_ForwardAccumulatorPushState()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_ForwardAccumulatorPopState()
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def await_pending() -> None:
    """Wait for pending operations where this thread executes asynchronously.

    It does after `tf.config.experimental.set_synchronous_execution(False)`. The export of a pending tensor waits too,
    but with Python's lock held, which an operation needs to let go of a tensor of another framework. The public call
    that tells of the mode takes 2 us, and this 0.4.
    """
    executor = pywrap_tfe.TFE_ContextGetExecutorForThread(context.context()._context_handle)
    is_asynchronous = pywrap_tfe.TFE_ExecutorIsAsync(executor)
    pywrap_tfe.TFE_DeleteExecutor(executor)
    if is_asynchronous:
        context.async_wait()


def in_xla_context() -> bool:
    """Whether the graph being built is inside `tf.function(jit_compile=True)`; the public API does not tell."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


@contextlib.contextmanager
def drawing() -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether this thread has drawn from TensorFlow's own generators since.

    These are parts of operations, which no public call tells of; `tf.random.Generator`'s is a variable. In a graph,
    operations that would draw count, whether they run or not.
    """
    kinds: set[str] = set()
    graph = None if executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())

    def note(op_type: Any, *_: Any, **__: Any) -> None:
        kinds.add(op_type.decode() if isinstance(op_type, bytes) else op_type)

    def found() -> bool:
        nodes = [] if graph is None else [op.node_def for op in graph.get_operations()[before:]]
        return _draws(kinds.union(*map(_called, nodes)))

    op_callbacks.add_op_callback(note)
    try:
        yield found
    finally:
        op_callbacks.remove_op_callback(note)


def _called(node: Any) -> set[str]:
    """Return what a node of a graph runs: its operation, and the functions that it calls."""
    functions = [a.func.name for a in node.attr.values() if a.HasField("func")]
    return {node.op, *functions, *(f.name for a in node.attr.values() for f in a.list.func)}


def _draws(kinds: set[str]) -> bool:
    known, pending = context.context(), list(kinds)
    seen = set(kinds)
    while pending:
        kind = pending.pop()
        if kind in _DRAWING:
            return True
        if known.has_function(kind):
            inner = set().union(*map(_called, known.get_function_def(kind).node_def)) - seen
            seen |= inner
            pending.extend(inner)
    return False


_DRAWING = frozenset(
    [
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "TruncatedNormal",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "Multinomial",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "UniformCandidateSampler",
        "LogUniformCandidateSampler",
        "FixedUnigramCandidateSampler",
        "AllCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "ThreadUnsafeUnigramCandidateSampler",
        "FractionalMaxPool",
        "FractionalAvgPool",
    ]
)


def has_started() -> bool:
    """Whether the eager runtime, and with it its thread pools, exists."""
    return context.context()._context_handle is not None


def shape_of(tensor: tf.Tensor) -> tuple[int, ...]:
    """Return the shape of an eager tensor, as `tuple(tensor.shape)` does in ten times the time."""
    shape: tuple[int, ...] = tensor._shape_tuple()
    return shape


def gradients(
    tape: tf.GradientTape, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], cts: Sequence[tf.Tensor]
) -> Sequence[Any]:
    """Return what `tape.gradient(outputs, inputs, cts)` does for eager tensors.

    The public method walks the structure of its arguments for longer than it differentiates a small function (60 us),
    and advises against what `TapePullback.vjp` does on purpose: to differentiate while the tape records.
    """
    found: Sequence[Any] = imperative_grad(tape._tape, list(outputs), list(inputs), list(cts), list(inputs))
    return found


def record(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Sequence[tf.Tensor | None]]
) -> None:
    """Tell every tape of this thread that `outputs` come from `inputs`, and how to pull cotangents back.

    This is what the public `tf.custom_gradient` does last; before that it inspects signatures and walks structures for
    longer than a small bridged call takes (100 us of 250).
    """
    record_operation("polybridge", outputs, inputs, gradient)


class GraphPair:
    """A concrete function as two: one that keeps what the other needs to pull cotangents back, for the first order.

    Under a persistent tape, or more than one, TensorFlow prepares every concrete function for derivatives of any order:
    it returns all intermediate values, and is handed zeros for the cotangent of each (0.5 to 5 ms a call of a small
    network). The public API has no other way to call it there.

    Args:
        concrete: the function.
    """

    def __init__(self, concrete: Any) -> None:
        """Build both, once."""
        self._count = len(concrete.graph.outputs)
        self._captured = list(concrete.captured_inputs)
        self._forward, self._backward = concrete._delayed_rewrite_functions.forward_backward()
        places = {id(y): i for i, y in enumerate(concrete.graph.outputs)}
        self._kept = [places.get(id(x), x) for x in self._backward.captured_inputs]
        self._differentiable = [backprop_util.IsTrainable(y) for y in concrete.graph.outputs[: self._count]]

    def __call__(self, inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Callable[..., Sequence[Any]]]:
        """Return the results, and a function from their cotangents, all there, to those of the inputs (None: zero)."""
        with stop_recording(), as_written():
            found = self._forward.call_flat(*inputs, *self._captured)
        kept = [found[x] if isinstance(x, int) else x for x in self._kept]
        count, differentiable, backward = len(inputs), self._differentiable, self._backward

        def pull(cts: Sequence[tf.Tensor]) -> Sequence[Any]:
            given = [ct for ct, d in zip(cts, differentiable, strict=True) if d]
            with as_written():
                return list(backward._call_flat(given, kept))[:count]

        return list(found[: self._count]), pull


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Run the graphs that this thread calls operation by operation, so that they give the bits that eager calls give.

    TensorFlow's optimiser fuses and reorders operations; its public switch is one for the whole process.
    """
    current = context.context()
    before, current.function_call_options = current.function_call_options, _AS_WRITTEN
    try:
        yield
    finally:
        current.function_call_options = before


_AS_WRITTEN = context.FunctionCallOptions()
_AS_WRITTEN._config_proto_serialized = None


def is_pure(concrete: Any) -> bool:
    """Whether a concrete function reads and draws nothing besides its inputs, so that it can be run again."""
    return not concrete.graph.variables and not any(op.op_def.is_stateful for op in concrete.graph.get_operations())


def py_function(
    fn: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    gradient: Any = None,
    vectorise: Callable[[Batch], Sequence[tf.Tensor]] | None = None,
) -> Sequence[tf.Tensor]:
    """Add the operation of `tf.py_function` to the graph being built, for a function that is differentiated otherwise.

    The public function enters AutoGraph's context, converts results that are tensors already and looks for tapes at
    every call, for as long as a small callback takes (35 us of 300 in a forward and a backward).

    Args:
        fn: takes eager tensors and returns a sequence of them, of `dtypes`.
        inputs: graph tensors.
        dtypes: of the results.
        gradient: what `gradient_of` the operation returns.
        vectorise: adds the operation for a batch to the graph, and returns its results with the examples along axis 0.
    """
    callback = _Callback(fn, list(dtypes), False)
    callback.gradient = gradient
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if not hasattr(graph, "_py_funcs_used_in_graph"):
        graph._py_funcs_used_in_graph = []
    graph._py_funcs_used_in_graph.append(callback)  # the registry's own reference is weak
    found: Any = gen_script_ops.eager_py_func(
        input=list(inputs), token=script_ops._py_funcs.insert(callback), is_async=False, Tout=list(dtypes)
    )
    if not dtypes:
        return []
    if vectorise is not None:
        found[0].op.pfor_converter = partial(_converted, callback, vectorise)
    return found


def gradient_of(op: Any) -> Any:
    """Return the gradient that an operation, or the one that it is a copy of, was made with."""
    return script_ops._py_funcs.get(op.get_attr("token").decode()).gradient


class _Callback(script_ops.EagerFunc):
    gradient: Any
    idle: Sequence[Sequence[int]] | None = None
    """The shapes of the results, once it serves the example that TensorFlow traced and runs for nobody."""

    def __call__(self, device: str | None, token: bytes, args: Sequence[tf.Tensor]) -> Any:
        if self.idle is not None:
            with context.eager_mode():
                return [tf.zeros(shape, dtype) for shape, dtype in zip(self.idle, self._out_dtypes, strict=True)]
        if device is not None:  # not the CPU's, where results are made
            return super().__call__(device, token, args)
        if executing_eagerly():  # a thread of TensorFlow's own is, one that runs a session need not be
            return self._func(*args)
        with context.eager_mode():
            return self._func(*args)


class Batch:
    """The inputs of an operation for all examples that `tf.vectorized_map` or a Jacobian wants at once."""

    def __init__(self, given: pfor._PforInput) -> None:
        """Keep what TensorFlow gives."""
        self._given = given

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The inputs; those that are stacked have one more axis, the first."""
        return [x.t for x in self._given.inputs]

    @property
    def stacked(self) -> list[bool]:
        """Whether each input has one value for each example, and not one that they share."""
        return [x.is_stacked for x in self._given.inputs]

    def stack(self, positions: Iterable[int]) -> None:
        """Give each example its own of these inputs.

        Raises:
            ConversionNotImplementedError: there are none, so that TensorFlow has to loop.
        """
        positions = list(positions)
        if not self._given.inputs:
            raise pfor.ConversionNotImplementedError("it has no inputs")
        self._given.stack_inputs(positions)

    def reads(self, position: int) -> bool:
        """Whether a result of the operation for one example is read, or leaves its graph."""
        result = self._given.outputs[position]
        return bool(result.consumers()) or any(y is result for y in getattr(result.graph, "outputs", ()))


def _converted(callback: _Callback, vectorise: Callable[[Batch], Sequence[tf.Tensor]], given: pfor._PforInput) -> Any:
    """Convert an operation for `tf.vectorized_map` or a Jacobian.

    TensorFlow asks an operation for a converter of its own first, which is how it converts loops. One registered for
    the type of operation would be asked about every `tf.py_function`, and there may be one only.
    """
    results = [pfor.wrap(y) for y in vectorise(Batch(given))]
    if given.op.graph is tf.compat.v1.get_default_graph():
        callback.idle = [[n or 0 for n in y.shape] if y.shape.rank else [] for y in given.outputs]
    return results


def not_for_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function so that AutoGraph calls it as it is.

    The public `tf.autograph.experimental.do_not_convert` marks a wrapper that costs several microseconds a call.
    """
    marked: Callable[..., Any] = autograph_artifact(function)
    return marked


def keep_from_autograph(error: Exception) -> None:
    """Mark an exception so that AutoGraph lets it pass, as TensorFlow marks its own (2.21).

    It would raise another of the same type, if it can make one, without the cause and the notes.
    """
    with contextlib.suppress(AttributeError):  # a frozen one
        error.ag_pass_through = True  # type: ignore[attr-defined]
