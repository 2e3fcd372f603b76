"""Transforms of torch around graphs that were made outside of them, and around calls that they have no part in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

from tests.torch_dst.sources import native, values, wrapped

Fn = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore::polybridge.LoopWarning"),  # of toy
    pytest.mark.usefixtures("all_freed"),
]


def one(m: SimpleNamespace, x: Any) -> Any:
    return m.sin(x) * x


def several(m: SimpleNamespace, x: Any) -> Any:
    return m.sin(x) * x, m.count(x), m.exp(x), m.sum(x * x)


def backward(y: torch.Tensor, w: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, w, ct, create_graph=True)[0]


def of_two(ys: Any, w: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    """Return a gradient to which two of the differentiable results contribute nothing, or a number."""
    return torch.autograd.grad([ys[2], ys[3]], w, [ct, ct.sum()], create_graph=True)[0]


AROUND_GRAPHS: dict[str, Callable[[Fn], torch.Tensor]] = {
    "rows of a Jacobian": lambda pull: vmap(pull)(torch.eye(3)),
    "nested": lambda pull: vmap(vmap(pull))(values(2, 4, 3)),
    "another axis": lambda pull: vmap(pull, in_dims=1)(values(3, 2)),
    "by the cotangent": lambda pull: grad(lambda ct: pull(ct).sin().sum())(values(3)),
    "Jacobian by the cotangent": lambda pull: jacrev(lambda ct: pull(ct).sin())(values(3)),
    "per cotangent": lambda pull: vmap(grad(lambda ct: pull(ct).sin().sum()))(values(2, 3)),
}
BESIDE: dict[str, Callable[[Fn, torch.Tensor], torch.Tensor]] = {
    "in a batch": lambda f, w: vmap(lambda x: x * f(w))(values(2, 3)),
    "in a gradient": lambda f, w: grad(lambda x: (x * f(w)).sum())(values(3)),
    "in a Jacobian": lambda f, w: jacrev(lambda x: x.sin() * f(w))(values(3)),
    "differentiated in a batch": lambda f, w: vmap(lambda x: x * backward(f(w), w, torch.ones(3)))(values(2, 3)),
}


def compared(way: Callable[[Fn, torch.Tensor], torch.Tensor], source: SimpleNamespace, requires_grad: bool) -> None:
    expected, found = [], []
    for fn, results in ((native(one), expected), (wrapped(source, one), found)):
        w = values(3, seed=1).requires_grad_(requires_grad)
        y = way(fn, w)
        results.append(y.detach())
        if requires_grad:
            results.append(torch.autograd.grad(y.sin().sum(), w)[0])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", AROUND_GRAPHS)
def test_a_transform_around_the_backward_of_a_graph(source: SimpleNamespace, way: str) -> None:
    def around(fn: Fn, w: torch.Tensor) -> torch.Tensor:
        y = fn(w)
        return AROUND_GRAPHS[way](lambda ct: backward(y, w, ct))

    compared(around, source, requires_grad=True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("way", BESIDE)
def test_a_call_that_a_transform_has_no_part_in(source: SimpleNamespace, way: str, requires_grad: bool) -> None:
    if requires_grad or "differentiated" not in way:
        compared(BESIDE[way], source, requires_grad)


def test_results_without_a_cotangent_in_a_batch(source: SimpleNamespace) -> None:
    found = []
    for fn in (native(several), wrapped(source, several)):
        w = values(3, seed=1).requires_grad_()
        ys = fn(w)
        found.append(vmap(lambda ct, ys=ys, w=w: of_two(ys, w, ct))(torch.eye(3)).detach())
    torch.testing.assert_close(found[1], found[0])


def test_results_without_a_cotangent_where_the_others_are_differentiated(source: SimpleNamespace) -> None:
    found, one, batch = [], values(3), values(2, 3)
    for fn in (native(several), wrapped(source, several)):
        w = values(3, seed=1).requires_grad_()
        ys = fn(w)

        def pull(ct: torch.Tensor, ys: Any = ys, w: torch.Tensor = w) -> torch.Tensor:
            return of_two(ys, w, ct).sin()

        with torch.device("meta"):  # which is for the user alone
            ways = jacrev(pull)(one), vmap(grad(lambda ct, pull=pull: pull(ct).sum()))(batch)
        found.append([y.detach() for y in ways])
    torch.testing.assert_close(found[1], found[0])
