"""How torch takes a relay in: an autograd function whose backward is again a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active as _are_transforms_active  # private, see `_elsewhere`
from torch._C import _is_tracing  # private: `torch.jit.is_tracing` takes five times as long (torch 2.13)
from torch._C import _len_torch_dispatch_stack as _open_modes  # private, see `_elsewhere`
from torch._C._autograd import _top_saved_tensors_default_hooks  # private: no public call shows them (torch 2.13)
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor  # private, as in transforms.py
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # private, see `_elsewhere`
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # private, as in source.py
from torch.autograd import forward_ad

from polybridge.backends.torch import compiled, convert, legacy, transforms
from polybridge.backends.torch.source import fake_mode, note_draw
from polybridge.core import residuals
from polybridge.core.abstract import Abstract
from polybridge.core.backend import spread
from polybridge.core.errors import CompilationError, NotDifferentiableError, ResidualError
from polybridge.core.relay import FunctionRelay, Outcome, Relay

Tensor = torch.Tensor


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of torch tensors that evaluates the relay and that autograd follows."""

    def native(*xs: Tensor) -> Outcome:
        if (
            _open_modes()
            or forward_ad._current_level >= 0
            or _are_transforms_active()
            or _is_tracing()
            or not convert.ORDINARY.issuperset(map(type, xs))
            or any(map(is_functorch_wrapped_tensor, xs))
        ):
            outcome = _elsewhere(relay, xs)
            if outcome is not None:
                return outcome
            if _are_transforms_active():  # on other tensors
                with temporarily_clear_interpreter_stack():
                    return native(*xs)
        if is_grad_enabled():
            wanted = [i for i, x in enumerate(xs) if x.requires_grad]
            if wanted:
                return _recorded(relay, xs, wanted)
            if not relay.told:  # one differentiated run, to see whether weights that the function holds are lost
                return relay.vjp(xs, ())[0]
        return relay(xs)

    return native


def _elsewhere(relay: FunctionRelay, xs: Sequence[Tensor]) -> Outcome | None:
    """Evaluate in a graph that is being traced, under a transform, or on fake tensors; None where it is none of these.

    Private: nothing public shows modes, transforms or levels of forward mode that are open (torch 2.13).

    Raises:
        CompilationError: in a trace of TorchScript.
    """
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
    return None


def traced(relay: FunctionRelay, xs: Sequence[Tensor]) -> Outcome:
    """Put an evaluation into a graph that is being traced."""
    plan = compiled.abstract(relay, xs)
    return Outcome(list(compiled.call(relay, xs)), plan.structure, plan.differentiable)


def crossing(relay: Relay, xs: Sequence[Tensor | None]) -> Outcome:
    """Evaluate a relay at inputs of which some require gradients, and record it."""
    return _recorded(relay, xs, [i for i, x in enumerate(xs) if x is not None and x.requires_grad])


def _recorded(relay: Relay, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> Outcome:
    hooks = _top_saved_tensors_default_hooks(False)
    # Hooks switch the check of versions off.
    lent = xs if hooks is None or _is_of_checkpoint(hooks) else relay.exchange.copies(xs)
    outcome, back = relay.vjp(lent, wanted)
    outcome.leaves = list(_record((back, wanted, outcome.differentiable, outcome.leaves, hooks), *xs))
    return outcome


def _is_of_checkpoint(hooks: tuple[Callable[..., Any], ...]) -> bool:
    return hooks[0].__module__ == torch.utils.checkpoint.__name__


class _Crossing(torch.autograd.Function):
    """One evaluation in torch's graph, which has been made already.

    The relay's residuals hang on a token tensor that is saved with the inputs: torch drops both when it frees the
    graph's buffers, and checks the inputs' version counters when backward unpacks them. Saved-tensor hooks lose what
    hangs on a tensor. Under them the token has a number instead, which a checkpoint that runs the function again
    replaces by that of the new run; all other hooks are taken to copy, and the node itself keeps the residuals.
    """

    # Without `setup_context`, for which torch binds the signature of `forward` at every call (20 us in 2.13).
    @staticmethod
    def forward(ctx: Any, evaluation: tuple[Any, ...], *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        back, wanted, differentiable, leaves, hooks = evaluation
        places = None
        if hooks is None:
            token: Any = torch.empty(0)
            token.polybridge_back = back
            if convert.is_distributed():
                places = convert.places(xs)
        else:
            token = torch.from_numpy(residuals.keep(back))
            ctx.back = None if _is_of_checkpoint(hooks) else back
        ctx.known = wanted, differentiable, len(xs), places
        ctx.save_for_backward(*xs, token)
        ctx.set_materialize_grads(False)
        if not all(differentiable):
            ctx.mark_non_differentiable(
                *(y for y, d in zip(leaves, differentiable, strict=True) if y is not None and not d)
            )
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> tuple[Tensor | None, ...]:
        *xs, token = ctx.saved_tensors
        wanted, differentiable, length, places = ctx.known
        if places is not None and convert.are_freed(places, xs):
            raise ResidualError.freed()
        inputs = [*map(xs.__getitem__, wanted), *compress(cts, differentiable)]
        back = getattr(token, "polybridge_back", None) or ctx.back or residuals.kept(int(token))
        is_plain = not (is_grad_enabled() or _are_transforms_active())
        for ct in cts:
            if ct is not None and is_legacy_batchedtensor(ct):
                is_plain = False
        if is_plain:
            found = back.rows(inputs).leaves
        elif any(map(_is_wrapped, inputs)):
            # Private: nothing public has the shapes and dtypes of a node's results (torch 2.13).
            found = _pull_wrapped(back, inputs, list(compress(ctx._input_metadata, differentiable)))
        else:
            found = _pull(back, inputs)
        return (None, *(found if len(found) == length else spread(found, wanted, length)))


# Private: `_Crossing.apply` without its look for transforms, which has been had: 5 us of 80 (torch 2.13).
_record: Callable[..., Any] = super(torch.autograd.Function, _Crossing).apply


def _is_wrapped(x: Tensor | None) -> bool:
    return x is not None and (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x))


def _pull(back: Relay, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    if _are_transforms_active():  # on other tensors
        with temporarily_clear_interpreter_stack():
            return _pull(back, inputs)
    followed = is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return (crossing(back, inputs) if followed else back.rows(inputs)).leaves


def _pull_wrapped(back: Relay, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Tensor | None]:
    """Pull back what a transform around the backward has wrapped; outputs have `shape` and `dtype`."""
    if legacy.is_batch(inputs):
        return legacy.by_rows(partial(_pull, back), inputs)
    count = len(inputs) - len(outputs)
    cts = [
        torch.zeros(y.shape, dtype=y.dtype, device="cpu") if ct is None else ct
        for ct, y in zip(inputs[count:], outputs, strict=True)
    ]
    return transforms.pulled(back, inputs[:count], cts)


def _abstract(relay: FunctionRelay, xs: Sequence[Tensor | None], mode: FakeTensorMode) -> Outcome:
    """Evaluate at fake tensors: the results have the right specs, and depend on what they depend on."""
    tensors = [x for x in xs if x is not None]
    with unset_fake_temporarily():
        specs = [convert.spec(x) for x in tensors]
        wanted = [i for i, spec in enumerate(specs) if spec.differentiable]
        plan = relay.abstract(specs, wanted)
        connected = _connected(plan, len(wanted))
    if plan.draws:
        note_draw()
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
        y = convert.empty(cast(tuple[int, ...], spec.shape), spec.dtype)
        leaves.append(sum((w.to(y.dtype) for w in weights), start=y) if spec.differentiable else y)
    return leaves
