"""How torch takes a relay in: an autograd function whose backward is again a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch._C import _is_tracing  # private: `torch.jit.is_tracing` takes five times as long (torch 2.13)
from torch._C._autograd import _top_saved_tensors_default_hooks  # private: no public call shows them (torch 2.13)
from torch._C._functorch import is_functorch_wrapped_tensor  # private, as in transforms.py
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # private, as in source.py

from polybridge.backends.torch import compiled, convert, legacy, transforms
from polybridge.backends.torch.source import fake_mode
from polybridge.core import residuals
from polybridge.core.abstract import Abstract
from polybridge.core.backend import spread
from polybridge.core.errors import CompilationError, NotDifferentiableError, ResidualError
from polybridge.core.relay import FunctionRelay, Outcome, Relay

Tensor = torch.Tensor


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of torch tensors that evaluates the relay and that autograd follows."""

    def native(*xs: Tensor) -> Outcome:
        if _is_tracing():
            raise CompilationError.in_torchscript(relay.call)
        mode = fake_mode()
        if mode is not None or not xs or compiled.is_traced(xs):
            is_transformed = transforms.is_forward_mode() or any(map(is_functorch_wrapped_tensor, xs))
            if compiled.is_tracing(mode, xs):
                return transforms.crossing(relay, xs) if is_transformed else traced(relay, xs)
            mode = mode or next((x.fake_mode for x in xs if type(x) is FakeTensor), None)
            if mode is not None:
                return _abstract(relay, xs, mode)
        if transforms.is_forward_mode() or any(map(is_functorch_wrapped_tensor, xs)):
            return transforms.crossing(relay, xs)
        grad = torch.is_grad_enabled()
        if grad and any(x.requires_grad for x in xs):
            return crossing(relay, xs)
        if grad and not relay.told:  # one differentiated run, to see whether weights that the function holds are lost
            return relay.vjp(xs, ())[0]
        return relay(xs)

    return native


def traced(relay: FunctionRelay, xs: Sequence[Tensor]) -> Outcome:
    """Put an evaluation into a graph that is being traced."""
    plan = compiled.abstract(relay, xs)
    return Outcome(list(compiled.call(relay, xs)), plan.structure, plan.differentiable)


def crossing(relay: Relay, xs: Sequence[Tensor | None]) -> Outcome:
    """Evaluate a relay at inputs of which some require gradients, and record it."""
    run = _Run(relay)
    leaves = _Crossing.apply(run, *xs)  # type: ignore[no-untyped-call]
    assert run.outcome is not None
    run.outcome.leaves = list(leaves)
    return run.outcome


class _Run:
    """What goes into one evaluation, and comes out of it, beside tensors."""

    __slots__ = ("outcome", "relay")

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.outcome: Outcome | None = None


class _Crossing(torch.autograd.Function):
    """One evaluation in torch's graph.

    The relay's residuals hang on a token tensor that is saved with the inputs: torch drops both when it frees the
    graph's buffers, and checks the inputs' version counters when backward unpacks them. Saved-tensor hooks lose what
    hangs on a tensor. Under them the token has a number instead, which a checkpoint that runs the function again
    replaces by that of the new run; all other hooks are taken to copy, and the node itself keeps the residuals.
    """

    # Without `setup_context`, for which torch binds the signature of `forward` at every call (20 us in 2.13).
    @staticmethod
    def forward(ctx: Any, run: _Run, *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, x in enumerate(xs) if x is not None and x.requires_grad]
        hooks = _top_saved_tensors_default_hooks(False)
        is_checkpoint = hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
        lent = (
            xs if hooks is None or is_checkpoint else run.relay.exchange.copies(xs)
        )  # hooks switch the check of versions off
        with torch.enable_grad():  # as the caller had it: the foreign function may call torch again
            outcome, back = run.relay.vjp(lent, wanted)
        if hooks is None:
            token = torch.empty(0)
            token.polybridge_back = back
        else:
            token = torch.from_numpy(residuals.keep(back))
            ctx.back = None if is_checkpoint else back
        leaves, outcome.leaves = outcome.leaves, []  # those that autograd follows take their place
        run.outcome = outcome
        ctx.places = convert.places(xs) if hooks is None else []
        ctx.wanted, ctx.differentiable, ctx.count = wanted, outcome.differentiable, len(xs)
        ctx.save_for_backward(*xs, token)
        ctx.set_materialize_grads(False)
        if not all(outcome.differentiable):
            ctx.mark_non_differentiable(
                *(y for y, d in zip(leaves, outcome.differentiable, strict=True) if y is not None and not d)
            )
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> tuple[Tensor | None, ...]:
        *xs, token = ctx.saved_tensors
        if convert.are_freed(ctx.places, xs):
            raise ResidualError.freed()
        inputs = [xs[i] for i in ctx.wanted] + [ct for ct, d in zip(cts, ctx.differentiable, strict=True) if d]
        back = getattr(token, "polybridge_back", None) or ctx.back or residuals.kept(int(token))
        found = legacy.by_rows(partial(_pull, back), inputs) if legacy.is_batch(inputs) else _pull(back, inputs)
        return (None, *spread(found, ctx.wanted, ctx.count))


def _pull(back: Relay, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    followed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return (crossing(back, inputs) if followed else back.rows(inputs)).leaves


def _abstract(relay: FunctionRelay, xs: Sequence[Tensor | None], mode: FakeTensorMode) -> Outcome:
    """Evaluate at fake tensors: the results have the right specs, and depend on what they depend on."""
    tensors = [x for x in xs if x is not None]
    with unset_fake_temporarily():
        specs = [convert.spec(x) for x in tensors]
        wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
        plan = relay.abstract(specs, wanted)
        connected = _connected(plan, len(wanted))
    with mode, torch._C.DisableTorchFunction():  # torch's conversion of real tensors shall see these
        influence = [tensors[i] for i, c in zip(wanted, connected, strict=True) if c]
        leaves = _fakes(plan, [x if _is_fake(x) else mode.from_tensor(x) for x in influence])
    return Outcome(leaves, plan.structure, plan.differentiable)


def _is_fake(x: Tensor) -> bool:
    """Whether it is a fake, or what function transforms have made of one: a new fake would have no history."""
    return isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x)


def _connected(plan: Abstract, count: int) -> tuple[bool, ...]:
    """Return which inputs influence the results; where there is no derivative that could tell, all."""
    try:
        return plan.connected or (True,) * count
    except NotDifferentiableError:  # for whoever runs the backward, if anybody does
        return (True,) * count


def _fakes(plan: Abstract, influence: Sequence[Tensor]) -> list[Tensor | None]:
    """Return tensors of the plan's specs that depend on each of `influence`, in every order of derivative."""
    weights = [x.abs().sum().exp() for x in influence]
    leaves: list[Tensor | None] = []
    for spec in plan.specs:
        y = torch.empty(cast(tuple[int, ...], spec.shape), dtype=convert.torch_dtype(spec.dtype))
        leaves.append(sum((w.to(y.dtype) for w in weights), start=y) if spec.differentiable else y)
    return leaves
