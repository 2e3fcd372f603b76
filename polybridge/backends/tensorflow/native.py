"""How TensorFlow takes a relay in: a custom gradient, eager or in a graph, whose gradient is again a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, callbacks, convert
from polybridge.core.abstract import Abstract
from polybridge.core.backend import spread
from polybridge.core.callbacks import as_caller
from polybridge.core.errors import CompilationError, PromisedShapeError, UnsupportedTensorError
from polybridge.core.relay import FunctionRelay, Outcome, Relay
from polybridge.core.specs import TensorSpec
from polybridge.core.trees import path

Tensor = Any


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of TensorFlow tensors that evaluates the relay and that tapes and graphs follow."""
    plans: dict[tuple[TensorSpec, ...], Abstract] = {}

    def native(*xs: Any) -> Outcome:
        try:
            tensors = [convert.dense(x) for x in xs]
        except UnsupportedTensorError as error:
            raise relay.located(xs, error) from None
        if not tf.executing_eagerly():
            return _in_graph(relay, tensors, plans)
        if not relay.exchange.source.differentiating():
            return relay(tensors)
        if _private.is_followed(tensors):
            return _eager(relay, tensors)
        if not relay.told and _private.is_taped():  # one differentiated run, to see whether it holds weights
            return relay.vjp(tensors, ())[0]
        return relay(tensors)

    return native


def _eager(relay: Relay, xs: Sequence[Tensor | None]) -> Outcome:
    """Evaluate now and record the gradient."""
    wanted = [i for i, x in enumerate(xs) if x is not None and _is_differentiable(x) and _private.is_followed([x])]
    outcome, back = relay.vjp(xs, wanted)

    def gradient(*cts: Tensor | None) -> list[Tensor | None]:
        filled = iter(cts)
        taken = [None if y is None else next(filled) for y in outcome.leaves]
        inputs = [xs[i] for i in wanted]
        inputs += [ct for ct, differentiable in zip(taken, outcome.differentiable, strict=True) if differentiable]
        gradients = spread(_pulled(back, inputs, len(wanted)), wanted, len(xs))
        return [g for g, x in zip(gradients, xs, strict=True) if x is not None]

    present = [y for y in outcome.leaves if y is not None]
    recorded = iter(_recorded([x for x in xs if x is not None], present, gradient))
    return outcome.with_leaves([None if y is None else next(recorded) for y in outcome.leaves])


def _pulled(back: Relay, inputs: Sequence[Tensor | None], primals: int) -> Sequence[Tensor | None]:
    """Evaluate a pullback where its cotangents are: now, or in a graph such as that of `tape.jacobian`."""
    present = [x for x in inputs if x is not None]
    if any(map(tf.is_symbolic_tensor, present)):
        plan = Abstract([], (True,) * (len(inputs) - primals), None, None)
        pull = _Pull(lambda _: back, as_caller(back.exchange.source), back.call, plan, ())
        return pull(tf.constant([0], tf.int64), inputs[:primals], inputs[primals:])
    return (_eager(back, inputs) if _private.is_followed(present) else back(inputs)).leaves


def _in_graph(relay: FunctionRelay, xs: Sequence[Tensor], plans: dict[tuple[TensorSpec, ...], Abstract]) -> Outcome:
    """Add a callback to the graph being built, and record a gradient that is a callback too."""
    if _private.in_xla_context():
        raise CompilationError.in_xla(relay.call)
    specs = tuple(map(convert.spec, xs))
    wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
    plan = plans.get(specs)
    if plan is None:
        plan = plans[specs] = relay.abstract(specs, wanted)
    promised = list(map(_tf_spec, plan.specs))
    caller = as_caller(relay.exchange.source)

    def evaluate(*values: Tensor) -> list[Tensor]:
        return _checked(caller(relay, values) if relay.told else caller(relay.vjp, values, ())[0], plan, relay.call)

    def differentiate(*values: Tensor) -> list[Tensor]:
        outcome, back = caller(relay.vjp, values, wanted)
        return [*_checked(outcome, plan, relay.call), callbacks.keep(back)]

    def record(*inputs: Tensor) -> tuple[list[Tensor], Callable[..., list[Tensor | None]]]:
        *results, token = callbacks.call(differentiate, inputs, [*promised, tf.TensorSpec([1], tf.int64)])
        pull = _Pull(callbacks.kept, caller, relay.call, plan, ())

        def gradient(*cts: Tensor) -> list[Tensor | None]:
            taken = [ct for ct, differentiable in zip(cts, plan.differentiable, strict=True) if differentiable]
            return spread(pull(token, [inputs[i] for i in wanted], taken), wanted, len(inputs))

        return results, gradient

    if wanted and any(plan.differentiable) and relay.exchange.source.differentiating():
        leaves = list(tf.custom_gradient(record)(*xs))
    else:  # the gradient that TensorFlow gives every Python callback is cut off
        leaves = [tf.stop_gradient(y) for y in callbacks.call(evaluate, xs, promised)]
    return Outcome(leaves, plan.structure, plan.differentiable)


@dataclass(frozen=True)
class _Pull:
    """A pullback in a graph, of any order.

    The callback finds the residual of the forward by its token and pulls back once for each earlier order before it
    pulls its own cotangents back; so a derivative that nobody asks for costs nothing in the lower orders.

    Args:
        residual: from the token to the pullback relay of first order.
        caller: runs a function as the thread that traced the call would.
        call: how messages name the function.
        plan: of what is pulled back.
        history: how many cotangents each earlier order took; they are the last of the primals.
    """

    residual: Callable[[Tensor], Relay]
    caller: Callable[..., Any]
    call: str
    plan: Abstract
    history: tuple[int, ...]

    def __call__(self, token: Tensor, primals: Sequence[Tensor], cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the cotangents of the primals, None where the plan says that there is none."""
        connected = [i for i, c in enumerate(self.plan.connected or (True,) * len(primals)) if c]
        present = [i for i, ct in enumerate(cts) if ct is not None]
        specs = [_tf_spec(convert.spec(primals[i])) for i in connected]

        def evaluate(token: Tensor, *values: Tensor) -> list[Tensor]:
            given, taken = values[: len(primals)], spread(values[len(primals) :], present, len(cts))
            return self.caller(self._evaluate, token, given, taken, connected)

        def record(token: Tensor, *inputs: Tensor) -> tuple[list[Tensor], Callable[..., list[Tensor | None]]]:
            back = self.plan.back([convert.spec(x) for x in primals])
            pull = replace(self, plan=back, history=(*self.history, len(cts)))

            def gradient(*cts: Tensor) -> list[Tensor | None]:
                return [None, *pull(token, inputs, cts)]

            return callbacks.call(evaluate, [token, *inputs], specs), gradient

        if not connected:
            return [None] * len(primals)
        results = tf.custom_gradient(record)(token, *primals, *(cts[i] for i in present))
        return spread(list(results), connected, len(primals))

    def _evaluate(
        self, token: Tensor, primals: Sequence[Tensor], cts: Sequence[Tensor | None], connected: Sequence[int]
    ) -> list[Tensor]:
        back = self.residual(token)
        count = len(primals) - sum(self.history)
        for taken in self.history:
            _, back = back.vjp(primals[count : count + taken], range(count + taken))
            count += taken
        found = back(cts).leaves
        return [tf.zeros_like(primals[i]) if found[i] is None else found[i] for i in connected]


def _recorded(
    xs: Sequence[Tensor], ys: Sequence[Tensor], gradient: Callable[..., Sequence[Tensor | None]]
) -> list[Tensor]:
    """Return `ys` as tensors whose gradient with respect to `xs` is `gradient`."""

    def record(*_: Tensor) -> Any:
        return ys, gradient

    return list(tf.custom_gradient(record)(*xs))


def _checked(outcome: Outcome, plan: Abstract, call: str) -> list[Tensor]:
    """Return the leaves of an outcome if they are what the plan promised.

    Raises:
        PromisedShapeError: they are not; TensorFlow itself would not notice.
    """
    found = [convert.spec(y) for y in outcome.leaves]
    if len(found) != len(plan.specs):
        raise PromisedShapeError.differs(call, "the result", f"{len(found)} tensors", f"{len(plan.specs)}")
    for i, (spec, promised) in enumerate(zip(found, plan.specs, strict=True)):
        if not promised.admits(spec):
            where = path(plan.structure.treedef, plan.structure.dynamic[i], "result") if plan.structure else "result"
            raise PromisedShapeError.differs(call, where, spec, promised)
    return outcome.leaves


def _is_differentiable(x: Tensor) -> bool:
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def _tf_spec(spec: TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype))
