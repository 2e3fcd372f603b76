"""The columns of the grid by the methods that a function of arrays has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.grid.analytic import TANGENT
from tests.grid.cells import Case

Fn = Callable[..., Any]
ROWS = np.eye(len(TANGENT))


def run(case: Case, f: Fn, total: Fn, x: Any) -> Any:
    """Return what the case asks for at `x`; gradients and Hessians are those of a function of one number."""
    return _WAYS[case.column, case.way](f, total, x)


_WAYS: dict[tuple[str, str], Callable[[Any, Any, Any], Any]] = {
    ("value", "a call"): lambda f, total, x: f(x),
    ("first", "f.grad"): lambda f, total, x: total.grad(x),
    ("first", "f.vjp"): lambda f, total, x: f.vjp(x)[1](np.ones_like(x))[0],
    ("second", "f.hessian"): lambda f, total, x: total.hessian(x).sum(0),
    ("jvp", "f.jvp"): lambda f, total, x: f.jvp((x,), (TANGENT,))[1],
    ("jacobian", "f.vjp"): lambda f, total, x: [f.vjp(x)[1](row)[0] for row in ROWS],
    ("jacobian", "f.jvp"): lambda f, total, x: np.transpose([f.jvp((x,), (row,))[1] for row in ROWS]),
    ("hessian", "f.hessian"): lambda f, total, x: total.hessian(x),
}
