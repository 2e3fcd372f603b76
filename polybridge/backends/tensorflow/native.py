"""How TensorFlow takes a relay in: a custom gradient, eager or in a graph, whose gradient is again a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, callbacks, convert
from polybridge.core import forks
from polybridge.core.abstract import Abstract
from polybridge.core.backend import spread
from polybridge.core.callbacks import as_caller
from polybridge.core.errors import CompilationError, PromisedShapeError, UnsupportedTensorError
from polybridge.core.relay import FunctionRelay, Outcome, Relay
from polybridge.core.specs import TensorSpec

Tensor = Any


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of TensorFlow tensors that evaluates the relay and that tapes and graphs follow."""
    plans: dict[Any, Abstract] = {}

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
    present = [x for x in xs if x is not None]
    wanted = [i for i, x in enumerate(xs) if x is not None and _is_wanted(x)]
    outcome, back = relay.vjp(xs, wanted)
    primals = [xs[i] for i in wanted]
    recorded = [i for i, y in enumerate(outcome.leaves) if y is not None]
    outputs = [i for i, differentiable in enumerate(outcome.differentiable) if differentiable]
    zeros = [_zeros_like(outcome.leaves[i]) for i in outputs]

    def gradient(*cts: Tensor | None) -> list[Tensor | None]:
        given = dict(zip(recorded, cts, strict=True))
        taken = [given.get(i) for i in outputs]
        if any(ct is not None and tf.is_symbolic_tensor(ct) for ct in taken):  # in the graph of `tape.jacobian`
            filled = [zero() if ct is None else ct for ct, zero in zip(taken, zeros, strict=True)]
            found = _pulled_in_graph(back, primals, filled)
        elif _private.is_followed([x for x in (*primals, *taken) if x is not None]):
            found = _eager(back, [*primals, *taken]).leaves
        else:
            found = back([*primals, *taken]).leaves
        gradients = spread(found, wanted, len(xs))
        return [g for g, x in zip(gradients, xs, strict=True) if x is not None]

    _private.record([outcome.leaves[i] for i in recorded], present, gradient)
    return outcome


def _pulled_in_graph(back: Relay, primals: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
    """Pull symbolic cotangents back through an evaluation that was eager."""
    plan = Abstract([], (True,) * len(cts), None, None)
    pull = _Pull(back.call, lambda _: back, as_caller(back.exchange.source), plan, ())
    return pull(tf.constant([0], tf.int64), primals, cts)


def _in_graph(relay: FunctionRelay, xs: Sequence[Tensor], plans: dict[Any, Abstract]) -> Outcome:
    """Add a callback to the graph being built, and record a gradient that is a callback too."""
    forks.check(relay.call)
    if _private.in_xla_context():
        raise CompilationError.in_xla(relay.call)
    specs = tuple(map(convert.spec, xs))
    wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
    followed = relay.exchange.source.differentiating()
    plan = plans.get((specs, followed))
    if plan is None:
        plan = plans[specs, followed] = relay.abstract(specs, wanted)
    promised = list(map(_tf_spec, plan.specs))
    exact = [(spec.shape, tf.as_dtype(spec.dtype)) for spec in plan.specs]
    caller = as_caller(relay.exchange.source)

    def evaluate(*values: Tensor) -> list[Tensor]:
        look = followed and not relay.told  # one differentiated run, to see whether it holds weights
        outcome = relay.vjp(values, ())[0] if look else relay(values)
        return checked(outcome)

    def differentiate(*values: Tensor) -> list[Tensor]:
        outcome, back = relay.vjp(values, wanted)
        return [*checked(outcome), callbacks.keep(back)]

    def checked(outcome: Outcome) -> list[Tensor]:
        found = [(_private.shape_of(y), y.dtype) for y in outcome.leaves if y is not None]
        return outcome.leaves if found == exact else _admitted(outcome, plan, relay.call)

    def gradient(inputs: Sequence[Tensor], results: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
        *outputs, token = results
        taken = [ct for ct, is_output in zip(_filled(cts[:-1], outputs), plan.differentiable, strict=True) if is_output]
        pull = _Pull(relay.call, callbacks.kept, caller, plan, ())
        return spread(pull(token, [inputs[i] for i in wanted], taken), wanted, len(inputs))

    if wanted and any(plan.differentiable) and followed:
        token = tf.TensorSpec([1], tf.int64)
        *leaves, _ = callbacks.call(relay.call, partial(caller, differentiate), xs, [*promised, token], gradient)
    else:
        leaves = callbacks.call(relay.call, partial(caller, evaluate), xs, promised, callbacks.without_gradient)
    return Outcome(leaves, plan.structure, plan.differentiable)


@dataclass(frozen=True)
class _Pull:
    """A pullback in a graph, of any order.

    The callback finds the residual of the forward by its token and pulls back once for each earlier order before it
    pulls its own cotangents back; so a derivative that nobody asks for costs nothing in the lower orders.

    Args:
        call: how messages name the function.
        residual: from the token to the pullback relay of first order.
        caller: runs a function as the thread that traced the call would.
        plan: of what is pulled back.
        history: how many cotangents each earlier order took; they are the last of the primals.
    """

    call: str
    residual: Callable[[Tensor], Relay]
    caller: Callable[..., Any]
    plan: Abstract
    history: tuple[int, ...]

    def __call__(self, token: Tensor, primals: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the cotangents of the primals, None where the plan says that there is none."""
        connected = [i for i, c in enumerate(self.plan.connected or (True,) * len(primals)) if c]
        if not connected:
            return [None] * len(primals)
        specs = [convert.spec(x) for x in primals]
        count, own = len(primals), len(primals) - sum(self.history)

        def evaluate(token: Tensor, *values: Tensor) -> list[Tensor]:
            found = self._evaluate(token, values[own:], own)
            return [tf.zeros_like(values[i]) if found[i] is None else found[i] for i in connected]

        def gradient(
            inputs: Sequence[Tensor], results: Sequence[Tensor], next_cts: Sequence[Tensor | None]
        ) -> list[Tensor | None]:
            token, *values = inputs
            pull = replace(self, plan=self.plan.back(specs), history=(*self.history, len(values) - count))
            return [None, *pull(token, values, _filled(next_cts, results))]

        promised = [_tf_spec(specs[i]) for i in connected]
        results = callbacks.call(self.call, partial(self.caller, evaluate), [token, *primals, *cts], promised, gradient)
        return spread(results, connected, count)

    def _evaluate(self, token: Tensor, cts: Sequence[Tensor], primals: int) -> Sequence[Tensor | None]:
        """Pull the last of the cotangents back, after those of the earlier orders in turn."""
        back, start = self.residual(token), 0
        for taken in self.history:
            _, back = back.vjp(cts[start : start + taken], range(primals + start + taken))
            start += taken
        return back(cts[start:]).leaves


def _admitted(outcome: Outcome, plan: Abstract, call: str) -> list[Tensor]:
    """Return the leaves of an outcome if the plan's promise has room for them.

    Raises:
        PromisedShapeError: they are not; TensorFlow itself would not notice.
    """
    found = [convert.spec(y) for y in outcome.leaves]
    if len(found) != len(plan.specs):
        raise PromisedShapeError.differs(call, "the result", f"{len(found)} tensors", f"{len(plan.specs)}")
    for i, (spec, promised) in enumerate(zip(found, plan.specs, strict=True)):
        if not promised.admits(spec):
            where = plan.structure.result(i) if plan.structure else "a gradient"
            raise PromisedShapeError.differs(call, where, spec, promised)
    return outcome.leaves


def _is_wanted(x: Tensor) -> bool:
    return convert.is_differentiable(x) and _private.is_followed([x])


def _zeros_like(x: Tensor) -> Callable[[], Tensor]:
    """Return what makes zeros like `x` without keeping `x` alive."""
    return partial(tf.zeros, x.shape, x.dtype)


def _filled(cts: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the cotangents with zeros for those that TensorFlow left out."""
    return [tf.zeros_like(y) if ct is None else ct for ct, y in zip(cts, outputs, strict=True)]


def _tf_spec(spec: TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype))
