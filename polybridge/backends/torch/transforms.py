"""How torch's function transforms see a relay: `torch.func`, and forward-mode automatic differentiation.

Three autograd functions of tensors alone, each with a rule for every transform: the evaluation of a relay, the pull of
any order (`core.orders`) through that evaluation, which a token tensor stands for, and the push of tangents through it.
`native.py` has a faster one for plain reverse mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks  # private, as in native.py
from torch._C._functorch import (  # private: no public call shows them (torch 2.13)
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from torch.autograd import forward_ad

from polybridge.backends.torch import compiled, convert, legacy
from polybridge.core import orders, residuals
from polybridge.core.batching import BatchedRelay, batched
from polybridge.core.relay import FunctionRelay, Outcome, Relay

Tensor = torch.Tensor


def crossing(relay: FunctionRelay, xs: Sequence[Tensor]) -> Outcome:
    """Evaluate a relay at tensors that transforms have wrapped."""
    wanted = [i for i, x in enumerate(xs) if convert.is_differentiable(x)]
    run = _Run(relay, wanted, _differentiated_batches(), _is_followed(xs))
    *leaves, _ = _Evaluation.apply(run, *xs)  # type: ignore[no-untyped-call]
    assert run.outcome is not None
    return run.outcome.with_leaves(leaves)


def followed(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """Evaluate a relay at tensors of a graph, or of its trace, and let autograd follow the wanted ones."""
    *leaves, _ = _Evaluation.apply(_Run(relay, wanted), *xs)  # type: ignore[no-untyped-call]
    return leaves


def pulled(back: Relay, primals: Sequence[Tensor], cts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pull cotangents that transforms have wrapped back through an evaluation that was made outside of them."""
    return _pull((len(primals), len(cts)), torch.from_numpy(residuals.keep(back)), [*primals, *cts])


def is_forward_mode() -> bool:
    """Whether a level of `torch.autograd.forward_ad` is open; private: its public face does not tell (torch 2.13)."""
    return forward_ad._current_level >= 0


class _Run:
    """What goes into an evaluation, and comes out of it, beside tensors."""

    __slots__ = ("differentiated", "is_followed", "outcome", "relay", "wanted")

    def __init__(
        self,
        relay: FunctionRelay | BatchedRelay,
        wanted: Sequence[int],
        differentiated: frozenset[int] = frozenset(),
        is_followed: bool = True,
    ) -> None:
        self.relay, self.wanted, self.differentiated = relay, wanted, differentiated
        self.is_followed = is_followed
        self.outcome: Outcome | None = None


class _Evaluation(torch.autograd.Function):
    """`(run, *xs) -> (*leaves, token)`; the token keeps the residual."""

    @staticmethod
    def forward(run: _Run, *xs: Tensor) -> tuple[Tensor | None, ...]:
        if compiled.is_traced(xs):
            plan = compiled.abstract(run.relay, xs)
            run.outcome = Outcome([], plan.structure, plan.differentiable)
            return tuple(compiled.vjp(run.relay, xs, run.wanted))
        if not run.is_followed:  # a function that asks for values may have no derivative
            outcome = run.relay(xs) if run.relay.told else run.relay.vjp(xs, ())[0]
            run.outcome = outcome.with_leaves([])
            return (*outcome.leaves, torch.zeros(1, dtype=torch.int64, device="cpu"))
        lent = (
            xs if _top_saved_tensors_default_hooks(False) is None else run.relay.exchange.copies(xs)
        )  # as in native.py
        with torch.enable_grad():  # as the caller had it: the foreign function may call torch again
            outcome, back = run.relay.vjp(lent, run.wanted)
        run.outcome = outcome.with_leaves([])
        return (*outcome.leaves, torch.from_numpy(residuals.keep(back)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (run, *xs), (*leaves, token) = inputs, output
        ctx.count, ctx.wanted = len(xs), run.wanted
        ctx.differentiable = run.outcome.differentiable
        ctx.outputs = [(y.shape, y.dtype) for y, d in zip(leaves, ctx.differentiable, strict=True) if d]
        ctx.mark_non_differentiable(token, *(y for y, d in zip(leaves, ctx.differentiable, strict=True) if not d))
        others = (x for i, x in enumerate(xs) if i not in ctx.wanted)  # whose versions are to be checked too
        _save(ctx, token, *(xs[i] for i in ctx.wanted), *others)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> tuple[Tensor | None, ...]:
        token, *inputs = ctx.saved_tensors
        primals = inputs[: len(ctx.wanted)]
        taken = [ct for ct, d in zip(cts, ctx.differentiable, strict=False) if d]
        found = _pull((len(primals), len(taken)), token, [*primals, *taken])
        gradients: list[Tensor | None] = [None] * (1 + ctx.count)
        for position, gradient in zip(ctx.wanted, found, strict=True):
            gradients[1 + position] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        token, *inputs = ctx.saved_tensors
        primals = inputs[: len(ctx.wanted)]
        given = _filled([tangents[i] for i in ctx.wanted], primals)
        ones = [torch.ones(shape, dtype=dtype, device="cpu") for shape, dtype in ctx.outputs]
        found = iter(_push((len(primals),), token, primals, ones, given))
        return (*(next(found) if d else None for d in ctx.differentiable), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], run: _Run, *xs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        size, axes = info.batch_size, list(in_dims[1:])
        if not size:
            return _without_examples(run, axes, xs), 0
        inputs = list(xs)
        if _level() in run.differentiated:  # each example has a derivative of its own, also in what they share
            for i, axis in enumerate(axes):
                if axis is None and convert.is_differentiable(inputs[i]):
                    inputs[i], axes[i] = inputs[i].expand(size, *inputs[i].shape), 0
        inner = _Run(batched(run.relay, tuple(axes)), run.wanted, run.differentiated, run.is_followed)
        *leaves, token = _Evaluation.apply(inner, *inputs)  # type: ignore[no-untyped-call]
        run.outcome = inner.outcome
        return (*leaves, token.expand(size, *token.shape)), 0


def _without_examples(run: _Run, axes: Sequence[int | None], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what a batch of no examples has: results of the planned shapes, and a token of no rows."""
    specs = [convert.spec(x).without(axis) for x, axis in zip(xs, axes, strict=True)]
    plan = run.relay.abstract(specs, run.wanted)
    run.outcome = Outcome([], plan.structure, plan.differentiable)
    results = [convert.empty((0, *spec.shape), spec.dtype) for spec in plan.specs]  # type: ignore[misc]
    return (*results, torch.zeros(0, 1, dtype=torch.int64, device="cpu"))


class _Pull(torch.autograd.Function):
    """`(counts, token, *values) -> cotangents` of all values but the last count.

    `counts` says how many of the values are primals, and how many cotangents of each order.
    """

    @staticmethod
    def forward(counts: tuple[int, ...], token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(compiled.pull(counts, token, values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.counts, token, *values = inputs
        _save(ctx, token, *values)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> tuple[Tensor | None, ...]:
        token, *values = ctx.saved_tensors
        return (None, None, *_pull((*ctx.counts, len(cts)), token, [*values, *cts]))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        token, *values = ctx.saved_tensors
        ones = [torch.ones_like(v) for v in values[: len(values) - ctx.counts[-1]]]
        return tuple(_push(ctx.counts, token, values, ones, _filled(tangents, values)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], counts: tuple[int, ...], token: Tensor, *values: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        results = values[: len(values) - counts[-1]]
        return _mapped(_Pull, info.batch_size, in_dims[1:], counts, token, values, results)


class _Push(torch.autograd.Function):
    """`(counts, token, *values) -> tangents` of the results: values are primals, ones like the results, and tangents.

    `counts` says how many of them are primals, and how many are ones.
    """

    @staticmethod
    def forward(counts: tuple[int, int], token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        primals, ones, tangents = _thirds(counts, values)
        if compiled.is_traced((token, *values)):  # graphs have the pull alone
            return tuple(compiled.pull((*counts, len(tangents)), token, values)[len(primals) :])
        with torch.enable_grad():
            found = orders.push(residuals.kept(int(token[0])), primals, ones, tangents)
        return tuple(torch.zeros_like(one) if x is None else x for x, one in zip(found, ones, strict=True))

    setup_context = _Pull.setup_context

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> tuple[Tensor | None, ...]:
        token, *values = ctx.saved_tensors
        primals, ones, tangents = _thirds(ctx.counts, values)
        by_primals = _pull((*ctx.counts, len(primals)), token, [*primals, *cts, *tangents])[: len(primals)]
        by_tangents = _pull(ctx.counts, token, [*primals, *cts])
        return (None, None, *by_primals, *[None] * len(ones), *by_tangents)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        token, *values = ctx.saved_tensors
        primals, ones, along = _thirds(ctx.counts, values)
        like = [torch.ones_like(v) for v in (*primals, *ones)]
        counts = (*ctx.counts, len(along))
        return tuple(_push(counts, token, values, like, _filled(tangents, values))[len(primals) :])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], counts: tuple[int, int], token: Tensor, *values: Tensor
    ) -> tuple[tuple[Tensor, ...], int]:
        return _mapped(_Push, info.batch_size, in_dims[1:], counts, token, values, _thirds(counts, values)[1])


def _thirds(counts: tuple[int, int], values: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    primals, ones = counts
    return values[:primals], values[primals : primals + ones], values[primals + ones :]


def _mapped(
    function: Any,
    size: int,
    dims: Sequence[int | None],
    counts: tuple[int, ...],
    token: Tensor,
    values: Sequence[Tensor],
    like: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], int]:
    """Apply a function of `(counts, token, *values)` to a batch: whole where the evaluation was, else row by row.

    Its results are like those of the values that are named in `like`.
    """
    held, *axes = dims
    if not size:
        places = [next(i for i, v in enumerate(values) if v is one) for one in like]
        examples = [(v, axes[i]) for i, v in zip(places, like, strict=True)]
        return tuple(v.new_zeros((0, *(n for d, n in enumerate(v.shape) if d != a))) for v, a in examples), 0
    if held is not None:
        spread = [v.expand(size, *v.shape) if a is None else v.movedim(a, 0) for v, a in zip(values, axes, strict=True)]
        return tuple(function.apply(counts, token.select(held, 0), *spread)), 0
    rows = []
    for row in range(size):
        example = [v if a is None else v.select(a, row) for v, a in zip(values, axes, strict=True)]
        rows.append(function.apply(counts, token, *example))
    return tuple(map(torch.stack, zip(*rows, strict=True))), 0


def _pull(counts: tuple[int, ...], token: Tensor, values: Sequence[Tensor]) -> Sequence[Tensor]:
    return _applied(_Pull, counts, token, values)


def _push(
    counts: tuple[int, ...],
    token: Tensor,
    values: Sequence[Tensor],
    ones: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return the derivative in the direction of `tangents`, one like each of `ones`; see `core.orders`."""
    if len(counts) == 1:
        return _applied(_Push, (*counts, len(ones)), token, [*values, *ones, *tangents])
    found = _pull((*counts, len(ones), len(values)), token, [*values, *ones, *tangents])
    return found[len(values) :]


def _applied(function: Any, counts: tuple[int, ...], token: Tensor, values: Sequence[Any]) -> Sequence[Any]:
    if legacy.is_batch(values):
        return legacy.by_rows(lambda row: _applied(function, counts, token, row), values)
    found: Sequence[Any] = function.apply(counts, token, *values)
    return found


def _save(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _filled(tangents: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(v) if t is None else t for t, v in zip(tangents, values, strict=True)]


def _level() -> int:
    """Return the level of the transform whose rule is running: those above it have been left for the time."""
    return len(get_interpreter_stack() or ()) + 1


def _is_followed(xs: Sequence[Tensor]) -> bool:
    """Whether somebody differentiates, by a transform or outside of all."""
    keys = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    if is_forward_mode() or TransformType.Grad in keys or TransformType.Jvp in keys:
        return True
    return torch.is_grad_enabled() and any(_unwrapped(x).requires_grad for x in xs)


def _unwrapped(x: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _differentiated_batches() -> frozenset[int]:
    """Return the levels of `vmap` inside of which somebody differentiates."""
    keys = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    top = max((i for i, key in enumerate(keys) if key in (TransformType.Grad, TransformType.Jvp)), default=0)
    return frozenset(i + 1 for i, key in enumerate(keys[:top]) if key == TransformType.Vmap)
