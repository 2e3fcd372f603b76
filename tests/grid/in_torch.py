"""The columns of the grid by torch's own means: from a function to a function of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad, functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.grid.analytic import TANGENT
from tests.grid.cells import COMPILED, Case

Fn = Callable[..., Any]
DIRECTION = torch.tensor(TANGENT)


def run(case: Case, f: Fn, _: Fn, x: Any) -> Any:
    """Return what the case asks for at `x`."""
    way = _WAYS[case.column, case.way]
    if case.mode == COMPILED:
        torch._dynamo.reset()
        transformed = _compiled(way(f)) if case.way in _INSIDE else way(_compiled(f))
    else:
        transformed = way(f)
    return transformed(torch.tensor(x)).detach().numpy()


def _compiled(f: Fn) -> Fn:
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def _total(f: Fn) -> Fn:
    return lambda x: f(x).sum()


def _backward(f: Fn) -> Fn:
    def differentiated(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        f(x).sum().backward()
        return x.grad

    return differentiated


def _twice(f: Fn) -> Fn:
    def differentiated(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    return differentiated


def _dual(f: Fn) -> Fn:
    def pushed(x: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, DIRECTION))).tangent

    return pushed


_WAYS: dict[tuple[str, str], Callable[[Fn], Fn]] = {
    ("value", "a call"): lambda f: f,
    ("first", "Tensor.backward"): _backward,
    ("first", "torch.func.grad"): lambda f: grad(_total(f)),
    ("second", "torch.autograd.grad"): _twice,
    ("second", "torch.func.grad"): lambda f: grad(_total(grad(_total(f)))),
    ("jvp", "torch.func.jvp"): lambda f: lambda x: jvp(f, (x,), (DIRECTION,))[1],
    ("jvp", "torch.autograd.forward_ad"): _dual,
    ("vmap", "torch.func.vmap"): vmap,
    ("jacobian", "torch.func.jacrev"): jacrev,
    ("jacobian", "torch.func.jacfwd"): jacfwd,
    ("jacobian", "torch.autograd.functional.jacobian"): lambda f: lambda x: functional.jacobian(f, x),
    ("hessian", "torch.func.hessian"): lambda f: hessian(_total(f)),
    ("hessian", "torch.func.jacrev of torch.func.grad"): lambda f: jacrev(grad(_total(f))),
    ("hessian", "torch.autograd.functional.hessian"): lambda f: lambda x: functional.hessian(_total(f), x),
}
_INSIDE = {way for _, way in _WAYS if way == "a call" or way.startswith("torch.func.")}
"""What is compiled with the function; the other ways are taken around it, as in training."""
