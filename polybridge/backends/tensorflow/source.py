"""How TensorFlow evaluates and differentiates its own functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, callbacks
from polybridge.backends.tensorflow.convert import EagerTensor
from polybridge.core.abstract import Abstract, Evaluation
from polybridge.core.backend import Pullback, Rows
from polybridge.core.closures import given, reachable
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results
from polybridge.core.specs import TensorSpec
from polybridge.core.threads import PerThread

Tensor = Any


def run(fn: Callable[[], Any]) -> Any:
    """Call `fn()` eagerly."""
    with _executing():
        return fn()


def vjp(fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[list[Tensor], Pullback]:
    """Evaluate `fn` under a tape and return its outputs beside the pullback."""
    tape = tf.GradientTape(persistent=True)
    with _executing(), tape:
        inputs = _distinct(primals)
        for x in inputs:
            tape.watch(x)
        outputs = [y if type(y) is EagerTensor else tf.convert_to_tensor(y) for y in fn(*inputs)]
    return outputs, TapePullback(tape, inputs, outputs)


def vmap(fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
    """Return `fn` over batches: a graph, which is traced once per signature."""

    @tf.function(autograph=False)
    def mapped(*inputs: Tensor) -> Sequence[Tensor]:
        batch = [_first(x, axis) for x, axis in zip(inputs, axes, strict=True) if axis is not None]

        def example(elements: Sequence[Tensor]) -> Sequence[Tensor]:
            following = iter(elements)
            given = [x if axis is None else next(following) for x, axis in zip(inputs, axes, strict=True)]
            with _vectorising.set(True):
                return tuple(fn(*given))

        found: Sequence[Tensor] = tf.vectorized_map(example, batch, fallback_to_while_loop=False)
        return found

    def guarded(*inputs: Tensor) -> Sequence[Tensor]:
        if callbacks.inside():
            raise NotImplementedError("a graph might wait in vain inside a callback of another")
        with same_variable_scope():
            found: Sequence[Tensor] = mapped(*inputs)
        return found

    return guarded


@contextlib.contextmanager
def same_variable_scope() -> Iterator[None]:
    """Leave the variable scope of the caller's graph as it is where something raises that is tried and caught.

    `tf.map_fn` and its kind leave a caching device in it then, which `tf.recompute_grad` refuses (TensorFlow 2.21).
    """
    graph, scope = tf.compat.v1.get_default_graph(), tf.compat.v1.get_variable_scope()
    before = scope.caching_device
    try:
        yield
    except BaseException:
        with graph.as_default():  # in eager mode it cannot be set
            scope.set_caching_device(before)
        raise


_vectorising = PerThread(False)


def is_vectorising() -> bool:
    """Whether this thread traces the example of a batch."""
    return _vectorising.value


def _first(x: Tensor, axis: int) -> Tensor:
    """Return `x` with one axis before the others."""
    order = [axis, *(i for i in range(x.shape.rank) if i != axis)]
    return x if axis == 0 else tf.transpose(x, order)


class TapePullback(Pullback):
    """The pullback that a persistent tape holds. Resuming the tape records the pullback itself."""

    def __init__(self, tape: tf.GradientTape, inputs: list[Tensor | None], outputs: list[Tensor | None]) -> None:
        """Keep the tape.

        Args:
            tape: has recorded how the outputs come from the inputs.
            inputs: what is differentiated with respect to; None for a cotangent that was zero.
            outputs: None for one that no input influences.
        """
        self._tape, self._inputs, self._outputs = tape, inputs, outputs

    def __call__(self, cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the tape backward."""
        with _executing():
            return list(map(_dense, self._gradients(cts)))

    def rows(self, cts: Sequence[Tensor | None]) -> list[Tensor | Rows | None]:
        """Run the tape backward; what `tf.gather` looked up has rows."""
        with _executing():
            return [_rows(x, g) for x, g in zip(self._inputs, self._gradients(cts), strict=True)]

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Pullback]:
        """Run the tape backward while it records."""
        with _executing(), self._tape:
            watched = [None if ct is None else tf.identity(ct) for ct in cts]
            self._tape.watch([ct for ct in watched if ct is not None])
            found = list(map(_dense, self._gradients(watched)))
        return found, TapePullback(self._tape, [*self._inputs, *watched], found)

    def closed_over(self, fn: Callable[..., Any]) -> list[str]:
        """Name the trainable variables that the tape saw."""
        known = {id(v) for v in [*_frozen(fn), *given(fn)]}
        return [v.name.removesuffix(":0") for v in self._tape.watched_variables() if id(v) not in known]

    def _gradients(self, cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [(y, ct) for y, ct in zip(self._outputs, cts, strict=True) if y is not None and ct is not None]
        inputs = [x for x in self._inputs if x is not None]
        if not pairs or not inputs:
            return [None] * len(self._inputs)
        outputs, grads = zip(*pairs, strict=True)
        found = iter(_private.gradients(self._tape, outputs, inputs, grads))
        return [None if x is None else next(found) for x in self._inputs]


def _frozen(fn: Callable[..., Any]) -> list[Any]:
    """Return what Keras does not train of the layers that `fn` reaches; to a tape it is as trainable as the rest."""
    variables = (v for owner in reachable(fn).values() for v in getattr(owner, "non_trainable_variables", ()))
    return [v.value for v in variables if hasattr(v, "value")]


def _distinct(primals: Sequence[Tensor]) -> list[Tensor]:
    """Return the primals as different objects: a tape tells its sources apart by identity."""
    seen: set[int] = set()
    distinct = []
    for x in primals:
        distinct.append(tf.identity(x) if id(x) in seen else x)
        seen.add(id(x))
    return distinct


def _dense(gradient: Any) -> Tensor | None:
    """Return a gradient as a tensor: `tf.gather` and embeddings give `tf.IndexedSlices`."""
    if gradient is None or type(gradient) is EagerTensor:
        return gradient
    return tf.convert_to_tensor(gradient)


def _rows(x: Tensor | None, gradient: Any) -> Tensor | Rows | None:
    """Return `tf.IndexedSlices`, the gradient of `x`, as rows."""
    if not isinstance(gradient, tf.IndexedSlices) or x is None or not x.shape.is_fully_defined():
        return _dense(gradient)
    return Rows(tf.cast(gradient.indices, tf.int64), gradient.values, tuple(x.shape))


class Planning(Evaluator):
    """Finds specs by tracing a graph, which touches no variable; runs on ones where the function cannot be traced."""

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation at inputs of these specs."""
        try:
            found = self._traced(specs, wanted)
        except Exception:  # whatever tracing raises; what the function raises comes again
            found = None
        complete = found is not None and all(spec.concrete for spec in found.specs)
        return found if found is not None and complete else super().abstract(specs, wanted)

    def _traced(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        runs: list[tuple[Results, Pullback]] = []

        @tf.function(autograph=False)
        def trace(*placeholders: Tensor) -> None:
            with _planning.set(True):
                runs.append(self.vjp_on_copies(placeholders, wanted))

        with same_variable_scope():
            graph = trace.get_concrete_function(*(tf.TensorSpec(s.shape, s.dtype) for s in specs)).graph

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            with graph.as_default(), _planning.set(True):
                yield

        results, pullback = runs[-1]  # a function that makes variables is traced twice
        plan = self.plan(results)
        plan.evaluation = Evaluation(pullback, list(results.take_outputs()), tuple(range(len(wanted))), running)
        return plan


_planning = PerThread(False)  # whether what runs here is to be traced and not to be run


def is_planning() -> bool:
    """Whether this thread evaluates in the graph of a plan."""
    return _planning.value and not tf.executing_eagerly()


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Run eagerly, also while a graph is being built around the call."""
    return _PLAIN if tf.executing_eagerly() or _planning.value else tf.__internal__.eager_context.eager_mode()


def _executing() -> contextlib.AbstractContextManager[Any]:
    """Run eagerly, apart from who records around it; inside a callback of a running graph every `tf.function` too."""
    running = callbacks.functions_run_eagerly() if callbacks.inside() else eagerly()
    return running if _private.is_alone() else _apart(running)


@contextlib.contextmanager
def _apart(running: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with running, _private.apart():
        yield


_PLAIN = contextlib.nullcontext()
