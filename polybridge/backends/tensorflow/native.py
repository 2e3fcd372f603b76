"""How TensorFlow takes a relay in: a custom gradient, eager or in a graph, whose gradient is again a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, callbacks, convert
from polybridge.backends.tensorflow.rows import Layout
from polybridge.core import forks, orders, residuals, tokens
from polybridge.core.abstract import Abstract
from polybridge.core.backend import spread
from polybridge.core.batching import BatchedRelay, Looped, batched
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
            found = back.rows([*primals, *taken]).leaves
        gradients = spread(found, wanted, len(xs))
        return [g for g, x in zip(gradients, xs, strict=True) if x is not None]

    _private.record([outcome.leaves[i] for i in recorded], present, gradient)
    return outcome


def _pulled_in_graph(back: Relay, primals: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
    """Pull symbolic cotangents back through an evaluation that was eager."""
    plan = Abstract([], (True,) * len(cts), None, None)
    pull = _Pull(back.call, as_caller(back.exchange.source), plan, _first_order(len(cts)))
    with tf.init_scope():  # a value that the graph holds; its callbacks live as long as TensorFlow
        token = _token(back)
    return pull(token, primals, cts)


def _in_graph(relay: FunctionRelay, xs: Sequence[Tensor], plans: dict[Any, Abstract]) -> Outcome:
    """Add a callback to the graph being built, and record a gradient that is a callback too."""
    forks.check(relay.call)
    if _private.in_xla_context():
        raise CompilationError.in_xla(relay.call)
    source = relay.exchange.source
    results, plan = _Evaluation(relay, as_caller(source), source.differentiating(), plans, 0)(xs)
    return Outcome(results[: len(plan.specs)], plan.structure, plan.differentiable)


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation in a graph.

    Args:
        relay: what is evaluated.
        caller: runs a function as the thread that traced the call would.
        followed: whether that thread wants derivatives.
        plans: those that are known, by relay and inputs.
        batches: how many axes of examples every result has, the first ones.
    """

    relay: FunctionRelay | BatchedRelay
    caller: Callable[..., Any]
    followed: bool
    plans: dict[Any, Abstract]
    batches: int

    def __call__(self, xs: Sequence[Tensor]) -> tuple[list[Tensor], Abstract]:
        """Return the results, after which comes a token for the residual if there is a derivative, and their plan."""
        relay = self.relay
        specs = tuple(map(convert.spec, xs))
        wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
        plan = self._plan(specs, wanted)
        promised = list(map(_tf_spec, plan.specs))
        exact = [(spec.shape, tf.as_dtype(spec.dtype)) for spec in plan.specs]

        def evaluate(*values: Tensor) -> list[Tensor]:
            look = self.followed and not relay.told  # one differentiated run, to see whether it holds weights
            outcome = relay.vjp(values, ())[0] if look else relay(values)
            return checked(outcome)

        def differentiate(*values: Tensor) -> list[Tensor]:
            outcome, back = relay.vjp(values, wanted)
            leaves = checked(outcome)
            rows = _private.shape_of(leaves[0])[: self.batches]
            return [*leaves, _token(back, rows)]

        def checked(outcome: Outcome) -> list[Tensor]:
            found = [(_private.shape_of(y), y.dtype) for y in outcome.leaves if y is not None]
            assert outcome.structure is not None and plan.structure is not None
            if found == exact and outcome.structure.is_like(plan.structure):
                return outcome.leaves
            try:
                return _admitted(outcome, plan, relay)
            except PromisedShapeError:
                for key in [key for key, other in list(self.plans.items()) if other is plan]:
                    self.plans.pop(key, None)  # the next trace makes another
                raise

        def gradient(inputs: Sequence[Tensor], results: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor | None]:
            *outputs, token = results
            taken = [ct for ct, taken in zip(_filled(cts[:-1], outputs), plan.differentiable, strict=True) if taken]
            sparse = relay.exchange.sparse and not self.batches
            pull = _Pull(relay.call, self.caller, plan, _first_order(len(taken)), sparse=sparse)
            return spread(pull(token, [inputs[i] for i in wanted], taken), wanted, len(inputs))

        keeps = bool(wanted) and any(plan.differentiable) and self.followed
        if keeps:
            rows = promised[0].shape[: self.batches]
            promised.append(tf.TensorSpec([*rows, tokens.SIZE], tf.int64))
        run, of_run = (differentiate, gradient) if keeps else (evaluate, callbacks.without_gradient)
        call = partial(self.caller, run)
        return callbacks.call(relay.call, call, xs, promised, of_run, partial(self._vectorised, keeps)), plan

    def _plan(self, specs: tuple[TensorSpec, ...], wanted: Sequence[int]) -> Abstract:
        source = self.relay.exchange.source
        key = self.relay, specs, self.followed, source.modes()
        plan = self.plans.get(key)
        if plan is None:
            try:
                plan = self.plans[key] = self.relay.abstract(specs, wanted)
            except StopIteration as error:  # TensorFlow and Keras take it for the end of their data, as in callbacks
                raise RuntimeError(f"`{self.relay.call}` raised StopIteration: {error}") from error
            except Exception as error:
                _private.keep_from_autograph(error)
                raise
        return plan

    def _vectorised(self, keeps: bool, batch: _private.Batch) -> list[Tensor]:
        """Return the results and the token of one evaluation of the whole batch.

        Where somebody differentiates inside of the batch, each example has a derivative also in what they share. Where
        they share everything, each has an evaluation of its own nevertheless, as in a loop: it may be random.
        """
        shared = [i for i, stacked in enumerate(batch.stacked) if not stacked]
        if keeps and batch.reads(-1):
            batch.stack(i for i in shared if convert.is_differentiable(batch.inputs[i]))
        if not any(batch.stacked):
            batch.stack(shared)
        axes = tuple(0 if stacked else None for stacked in batch.stacked)
        over_batch = replace(self, relay=batched(self.relay, axes), batches=self.batches + 1)
        return over_batch(batch.inputs)[0]


Order = tuple[tuple[int, ...], int]
"""The cotangents that an order takes: which of the results of the order before have one, and how many these are."""


def _first_order(count: int) -> tuple[Order]:
    return ((tuple(range(count)), count),)


@dataclass(frozen=True)
class _Pull:
    """A pullback in a graph, of any order; see `core.orders`.

    The callback finds the residual of the forward by its token and pulls back once for each earlier order before it
    pulls its own cotangents back; so a derivative that nobody asks for costs nothing in the lower orders.

    Args:
        call: how messages name the function.
        caller: runs a function as the thread that traced the call would.
        plan: of what is pulled back.
        orders: the cotangents of each; those of the earlier ones are the last of the primals.
        loops: the axes of all primals and cotangents along which lie examples of one evaluation, the outermost first.
        sparse: whether cotangents may be rows; those of the first order only.
    """

    call: str
    caller: Callable[..., Any]
    plan: Abstract
    orders: tuple[Order, ...]
    loops: tuple[int, ...] = ()
    sparse: bool = False

    def __call__(self, token: Tensor, primals: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Any]:
        """Return the cotangents of the primals, None where the plan says that there is none."""
        count = len(primals)
        connected = [i for i, c in enumerate(self.plan.connected or (True,) * count) if c]
        if not connected:
            return [None] * count
        specs = [convert.spec(x) for x in primals]
        rows = (self.sparse and self.plan.rows) or (False,) * count
        layout = Layout([_tf_spec(specs[i]) for i in connected], [rows[i] for i in connected])
        own = count - sum(len(taken) for taken, _ in self.orders[:-1])
        places, results = self._places(own)

        def evaluate(token: Tensor, *values: Tensor) -> list[Tensor]:
            number = tokens.read(token.numpy())
            if not number:  # of a forward that TensorFlow runs for nobody, as it does this
                return layout.split([tf.zeros_like(values[i]) for i in connected])
            back = self._back(number, own)
            if self.sparse:
                found = back.rows([*[None] * own, *values[own:]]).leaves
            else:
                found = orders.pull(back, [None] * own, self._cotangents(values[own:]))
            given = [found[places[i]] for i in connected]
            return layout.split(
                [tf.zeros_like(values[i]) if x is None else x for i, x in zip(connected, given, strict=True)]
            )

        def gradient(
            inputs: Sequence[Tensor], results_: Sequence[Tensor], next_cts: Sequence[Tensor | None]
        ) -> list[Tensor | None]:
            token, *values = inputs
            order = tuple(places[i] for i in connected), results
            pull = replace(self, plan=self.plan.back(specs), orders=(*self.orders, order), sparse=False)
            return [None, *pull(token, values, layout.cotangents(results_, _filled(next_cts, results_)))]

        def vectorised(batch: _private.Batch) -> list[Tensor]:
            one_evaluation = not batch.stacked[0]
            batch.stack(i for i, stacked in enumerate(batch.stacked) if i and not stacked)
            token, *values = batch.inputs
            loops = (0, *self.loops) if one_evaluation else tuple(axis + 1 for axis in self.loops)
            found = replace(self, loops=loops, sparse=False)(token, values[:count], values[count:])
            return layout.split_batches([found[i] for i in connected])

        inputs = [token, *primals, *cts]
        call = partial(self.caller, evaluate)
        results_ = callbacks.call(self.call, call, inputs, layout.promised, gradient, vectorised)
        return spread(layout.join(results_), connected, count)

    def _places(self, own: int) -> tuple[list[int], int]:
        """Return where the primals are among the results of `orders.pull`, and how many these are."""
        places, start = list(range(own)), own
        for taken, count in self.orders[:-1]:
            places += [start + i for i in taken]
            start += count
        return places, start

    def _cotangents(self, values: Sequence[Tensor]) -> list[Sequence[Tensor | None]]:
        """Return the cotangents of each order; None for a result that the plan says is always zero."""
        if len(self.orders) == 1:
            return [values]
        following = iter(values)
        return [spread([next(following) for _ in taken], taken, count) for taken, count in self.orders]

    def _back(self, number: int, own: int) -> Relay:
        back = residuals.kept(number)
        for axis in reversed(self.loops):
            axes = [axis] * (own + self.orders[0][1])
            back = Looped(back.exchange, self.call, back, axes, axes[:own])
        return back


def _token(back: Relay, rows: tuple[int, ...] = ()) -> Tensor:
    """Return a tensor on memory that TensorFlow drops with its last reader, and the residual with it."""
    return convert.from_dlpack(tokens.keep(back, rows).__dlpack__())


def _admitted(outcome: Outcome, plan: Abstract, relay: FunctionRelay | BatchedRelay) -> list[Tensor]:
    """Return the leaves of an outcome if the plan's promise has room for them.

    Raises:
        PromisedShapeError: they are not; TensorFlow itself would not notice.
    """
    if outcome.structure and plan.structure and not outcome.structure.is_like(plan.structure):
        raise PromisedShapeError.differs(relay.call, "the result", outcome.structure, plan.structure)
    found = [convert.spec(y) for y in outcome.leaves]
    if len(found) != len(plan.specs):
        raise PromisedShapeError.differs(relay.call, "the result", f"{len(found)} tensors", f"{len(plan.specs)}")
    for i, (spec, promised) in enumerate(zip(found, plan.specs, strict=True)):
        if not promised.admits(spec):
            where = relay.program.result(plan.structure, i) if plan.structure else "a gradient"
            raise PromisedShapeError.differs(relay.call, where, spec, promised)
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
