"""Runs a function of tensors as a graph from the second call of a kind on: one-off calls are not worth a trace."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, callbacks
from polybridge.backends.tensorflow.convert import is_differentiable
from polybridge.backends.tensorflow.source import same_variable_scope
from polybridge.core.errors import UntracedWarning, warn
from polybridge.core.trees import Kind, Structure, separate

Tensor = Any
_GRAPHS = 32  # kinds of calls that one function keeps a graph for


class Traced:
    """A function of trees of tensors, traced once for each structure, set of shapes and dtypes that comes back.

    Shapes are traced as they are, none as unknown: a function may read them. What raises in a graph runs eagerly, so
    that errors are those of eager TensorFlow; if it succeeds there, it is never traced again, after an
    `UntracedWarning`.

    Args:
        fn: what runs.
        call: how messages name it.
    """

    def __init__(self, fn: Callable[..., Any], call: str) -> None:
        """Begin without graphs."""
        self._fn, self._call = fn, call
        self._graphs: OrderedDict[Any, _Graph | None] = OrderedDict()
        self._is_traceable = True
        self._making = threading.Lock()

    def __call__(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `fn(*args, **kwargs)`.

        Args:
            kind: hashable; a graph serves only calls of one kind.
            args: of the function.
            kwargs: of the function.
        """
        eager = not self._is_traceable or callbacks.inside() or tf.config.functions_run_eagerly()
        if eager or not tf.executing_eagerly():
            return self._fn(*args, **kwargs)
        tensors, structure = separate((args, kwargs), _classify, _converted)
        key = (kind, structure.key(), *((x.dtype, tuple(x.shape)) for x in tensors))
        if key not in self._graphs:
            self._graphs[key] = None
            while len(self._graphs) > _GRAPHS:
                self._graphs.popitem(last=False)
            return self._fn(*args, **kwargs)
        try:
            graph = self._graph(key, structure, tensors)
            return self._fn(*args, **kwargs) if graph is None else graph(tensors)
        except Exception as error:
            found = self._fn(*args, **kwargs)
            self._is_traceable = False
            self._graphs.clear()
            warn(UntracedWarning.in_tensorflow(self._call, error))
            return found

    def _graph(self, key: Any, structure: Structure, tensors: Sequence[Tensor]) -> _Graph | None:
        """Return the graph of a kind of calls, made if nobody makes one now: TensorFlow's are made on one thread."""
        graph = self._graphs.get(key)
        if graph is not None and graph.is_ready(tensors):
            return graph
        if not self._making.acquire(blocking=False):  # to wait could be to wait for ever
            return None
        try:
            graph = self._graphs.get(key) or _Graph(self._fn, structure, tensors)
            graph.make_ready(tensors)
            self._graphs[key] = graph
            return graph
        finally:
            self._making.release()


class _Graph:
    def __init__(self, fn: Callable[..., Any], structure: Structure, tensors: Sequence[Tensor]) -> None:
        results: list[Structure] = []

        @tf.function(autograph=False)
        def flat(*inputs: Tensor) -> list[Tensor]:
            args, kwargs = structure.rebuild(inputs)
            found, result = separate(fn(*args, **kwargs), _classify, _converted)
            results.append(result)
            return found

        with same_variable_scope():
            self._concrete = flat.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in tensors))
        self._structure = results[-1]
        self._held = structure  # its static values are told apart by identity in the key
        self._is_pure = _private.is_pure(self._concrete)
        self._pair: _private.GraphPair | None = None

    def is_ready(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all is made that a call needs."""
        return self._pair is not None or not self._is_recorded(tensors)

    def make_ready(self, tensors: Sequence[Tensor]) -> None:
        """Make what a call needs."""
        if not self.is_ready(tensors):
            self._pair = _private.GraphPair(self._concrete)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self._is_recorded(tensors):
            return self._structure.rebuild(self._recorded(tensors))
        with _private.as_written():
            return self._structure.rebuild(self._concrete(*tensors))

    def _is_recorded(self, tensors: Sequence[Tensor]) -> bool:
        return self._is_pure and _private.is_followed(tensors)

    def _recorded(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Evaluate with a derivative that is a graph too; one that is differentiated evaluates again."""
        assert self._pair is not None
        results, pull = self._pair(tensors)

        def gradient(*cts: Tensor | None) -> Sequence[Tensor | None]:
            given = [tf.zeros(y.shape, y.dtype) if ct is None else ct for ct, y in zip(cts, results, strict=True)]
            if not _private.is_followed([*tensors, *(ct for ct in given if not tf.is_symbolic_tensor(ct))]):
                return pull(given)
            with _private.as_written(), tf.GradientTape() as tape:
                tape.watch(tensors)
                again = self._concrete(*tensors)
                pairs = [(y, ct) for y, ct in zip(again, given, strict=True) if is_differentiable(y)]
                outputs, grads = zip(*pairs, strict=True)
            with _private.as_written():
                found: Sequence[Tensor | None] = tape.gradient(outputs, tensors, grads)
            return found

        _private.record(results, tensors, gradient)
        return results


def _classify(leaf: Any) -> Kind:
    return Kind.TENSOR if isinstance(leaf, tf.Tensor) else Kind.STATIC


def _converted(kind: Kind, leaf: Any, treedef: Any, position: int) -> Any:
    raise AssertionError(f"a leaf is a tensor or static, not {kind}")
