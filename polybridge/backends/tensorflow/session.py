"""A TensorFlow 1 graph and its session as an eager function, differentiable to any order.

The graph of the derivative reads tensors of the graph of the function. The forward run fetches these tensors, and
every value that could differ in a second run; the backward run feeds them. So no run repeats another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from polybridge.backends.tensorflow import _private, source
from polybridge.core import trees
from polybridge.core.errors import ArgumentError, DetachedStateWarning, NotDifferentiableError, warn
from polybridge.core.specs import SUPPORTED

Graph = Any
GraphTensor = Any
Kept = dict[str, np.ndarray[Any, Any]]
"""Values of graph tensors that one forward run computed, by tensor name."""

_VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_HARMLESS = _VARIABLES | {"Placeholder", "PlaceholderWithDefault", "ReadVariableOp", "Assert", "Print", "PrintV2"}


def graph_function(session: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return an eager function of the trees of `inputs` that returns the tree of `outputs`."""
    arguments = tuple(inputs) if type(inputs) in (list, tuple) else (inputs,)
    fed, expected = trees.flatten(arguments)
    fetched, returned = trees.flatten(outputs)
    for tensor in (*fed, *fetched):
        _check(tensor, session.graph)
    computation = _Function(session, fed, fetched)

    def function(*args: Any) -> Any:
        values, given = trees.flatten(args)
        if given != expected:
            raise ArgumentError(f"`graph_function` was built for inputs like {expected}, but was called with {given}.")
        tensors = [tf.convert_to_tensor(v, t.dtype) for v, t in zip(values, fed, strict=True)]
        return trees.unflatten(returned, computation(tensors))

    return function


class _Computation:
    """Tensors of a graph as a function of others, and its derivative as another such."""

    def __init__(self, session: Any, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> None:
        self.session, self.graph = session, session.graph
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.wanted = [i for i, x in enumerate(self.inputs) if _is_differentiable(x)]
        self.differentiable = [i for i, y in enumerate(self.outputs) if _is_differentiable(y)]

    @cached_property
    def back(self) -> tuple[_Computation, tuple[int, ...]]:
        """The derivative: `(inputs, cotangents) -> cotangents`, and for which wanted inputs it returns one."""
        if self.graph.finalized:
            raise ArgumentError("The session's graph is finalized, so that no gradient can be added to it.")
        outputs = [self.outputs[i] for i in self.differentiable]
        with self.graph.as_default():
            cts = [tf.compat.v1.placeholder(y.dtype, y.shape, name="polybridge_cotangent") for y in outputs]
            found = tf.gradients(outputs, [self.inputs[i] for i in self.wanted], grad_ys=cts) if outputs else []
            dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
        connected = tuple(i for i, g in enumerate(dense) if g is not None)
        return _Computation(self.session, [*self.inputs, *cts], [dense[i] for i in connected]), connected

    def evaluate(self, values: Sequence[tf.Tensor], kept: Kept) -> list[tf.Tensor]:
        """Run the graph with the inputs and what an earlier run kept."""
        feeds = {**{self.graph.get_tensor_by_name(n): v for n, v in kept.items()}, **self._feeds(values)}
        return [tf.convert_to_tensor(y) for y in self.session.run(self.outputs, feeds)]

    def differentiate(self, values: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], kept: Kept) -> list[tf.Tensor]:
        """Return the outputs as eager tensors whose gradient is the derivative's evaluation."""

        def pull(back: _Computation, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            found = back.evaluate(inputs, kept)
            return back.differentiate(inputs, found, kept) if _private.is_followed(inputs) else found

        def record(*xs: tf.Tensor) -> Any:
            return list(outputs), lambda *cts: self._pulled(pull, xs, cts)

        return list(tf.custom_gradient(record)(*values))

    def plan(self, values: Sequence[GraphTensor]) -> list[GraphTensor]:
        """Return the outputs in the graph of a plan: a copy that nobody runs, and that tapes follow as the original."""
        found = tf.graph_util.import_graph_def(
            self.graph.as_graph_def(add_shapes=True),
            input_map={x.name: v for x, v in zip(self.inputs, values, strict=True)},
            return_elements=[y.name for y in self.outputs],
        )
        outputs = list(map(tf.identity, found))  # an output may be an input
        _private.record(outputs, list(values), lambda *cts: self._pulled(_Computation.plan, values, cts))
        return outputs

    def _pulled(
        self,
        pull: Callable[[_Computation, Sequence[Any]], Sequence[Any]],
        xs: Sequence[Any],
        cts: Sequence[Any],
    ) -> list[Any]:
        """Return the cotangent of each input, None where nothing depends on it."""
        back, connected = self.back
        gradients: list[Any] = [None] * len(xs)
        for position, value in zip(connected, pull(back, [*xs, *(cts[i] for i in self.differentiable)]), strict=True):
            gradients[self.wanted[position]] = value
        return gradients

    def _feeds(self, values: Sequence[tf.Tensor]) -> dict[GraphTensor, Any]:
        return {x: v.numpy() for x, v in zip(self.inputs, values, strict=True)}


class _Function(_Computation):
    """The user's graph: runs forward, and keeps what the derivatives of every order will be fed with."""

    def __init__(self, session: Any, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> None:
        super().__init__(session, inputs, outputs)
        self._run = session.make_callable(self.outputs, feed_list=self.inputs)
        back, _ = self.back  # ahead: the graph may be finalized later
        self._residuals, self._lost = _residuals(self, back)
        self._run_keeping = session.make_callable([self.outputs, self._residuals], feed_list=self.inputs)
        self._told = False

    def __call__(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if source.is_planning():
            return self.plan(values)
        arrays = [v.numpy() for v in values]
        if not _private.is_followed(values):
            return list(map(tf.convert_to_tensor, self._run(*arrays)))
        self._tell()
        outputs, residuals = self._run_keeping(*arrays)
        kept = {t.name: value for t, value in zip(self._residuals, residuals, strict=True)}
        return self.differentiate(values, list(map(tf.convert_to_tensor, outputs)), kept)

    def _tell(self) -> None:
        """Refuse what cannot be right, and warn once of variables that get no gradient."""
        if self._lost:
            raise NotDifferentiableError(
                f"`graph_function` cannot be differentiated: {', '.join(self._lost)} has another value in every run, "
                f"and it cannot be kept from forward to backward, since it sits inside control flow. "
                f"Pass it as an input."
            )
        if not self._told:
            self._told = True
            names = _trainable_names(self.graph, _ancestors(self.outputs, stop=[x.name for x in self.inputs]))
            if names:
                warn(DetachedStateWarning.naming("graph_function", names))


def _residuals(function: _Computation, back: _Computation) -> tuple[list[GraphTensor], list[str]]:
    """Return the tensors that a forward run has to keep, and the operations whose values cannot be kept."""
    fed = {x.name for x in back.inputs}
    forward = _ancestors(function.outputs, stop=fed)
    derivative = [op for op in _ancestors(back.outputs, stop=fed) if op not in forward]
    read = [x for op in derivative for x in op.inputs if x.op in forward]
    drawn = [y for op in forward if op.op_def.is_stateful for y in op.outputs]
    kept = {y.name: y for y in (*read, *drawn) if _can_keep(y, function.graph) and y.name not in fed}
    again = _ancestors(back.outputs, stop=fed | kept.keys())
    lost = [op.name for op in again if op.op_def.is_stateful and op.type not in _HARMLESS]
    return list(kept.values()), lost


def _ancestors(tensors: Iterable[GraphTensor], stop: Iterable[str]) -> set[Any]:
    """Return the operations that compute the tensors, not going past those whose names are in `stop`."""
    stop = set(stop)
    found: set[Any] = set()
    pending = [t.op for t in tensors if t.name not in stop]
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending.extend(x.op for x in op.inputs if x.name not in stop)
    return found


def _can_keep(tensor: GraphTensor, graph: Graph) -> bool:
    return tensor.dtype.name in SUPPORTED and graph.is_fetchable(tensor) and graph.is_feedable(tensor)


def _is_differentiable(tensor: GraphTensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _trainable_names(graph: Graph, operations: set[Any]) -> list[str]:
    with graph.as_default():
        variables = tf.compat.v1.trainable_variables()
    names = {op.name for op in operations if op.type in _VARIABLES}
    return [v.op.name for v in variables if v.op.name in names]


def _check(tensor: Any, graph: Graph) -> None:
    if not isinstance(tensor, tf.Tensor) or getattr(tensor, "graph", None) is not graph:
        raise ArgumentError(f"`graph_function` takes tensors of the session's graph, got {tensor!r}.")
