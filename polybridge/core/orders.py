"""Derivatives of any order as functions of tensors alone, replayed from the residual of the one forward.

Frameworks that transform functions hold a derivative as an operation on tensors, which may be run later, more than
once, or be differentiated itself. With z0 for the primals, the operation of order k is

    pull(z0, ct1, ..., ctk) = the derivative of <pull(z0, ..., ct(k-1)), ctk> with respect to (z0, ..., ct(k-1))

where the pull of order 0 is the function. Forward mode needs no operation of its own: the derivative of order k in the
direction t is linear in what order k+1 is given, so it is order k+2 at (ones, t), of which the part for the ones is
taken. This is the double-vjp construction: https://j-towns.github.io/2017/06/12/A-new-trick.html. Any numbers would do
in place of the ones, were there no pullbacks that take logarithms of cotangents, such as torch's of `logcumsumexp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polybridge.core.backend import spread
from polybridge.core.relay import Relay

Tensor = Any


def pull(back: Relay, primals: Sequence[Tensor | None], cts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Evaluate the pull of order `len(cts)`.

    Args:
        back: the pullback of the forward.
        primals: of the forward; None for one that need not be at hand, since the residual has its value.
        cts: the cotangents of each order: those of the first for the differentiable results of the function, those of
            every further one for each result of the order before. None stands for zero.

    Returns:
        A cotangent for each primal and each cotangent of the earlier orders; None where there is no influence.
    """
    values = [*primals, *cts[0]]
    if len(cts) == 1:
        return back(values).leaves
    inputs, leaves = list(range(len(values))), list(range(len(primals)))  # where those of the relay are among `values`
    for following in cts[1:]:
        outcome, back = back.vjp([values[i] for i in inputs], range(len(inputs)))
        connected = [len(values) + p for p, c in zip(leaves, outcome.differentiable, strict=True) if c]
        leaves, inputs = inputs, inputs + connected
        values += following
    return spread(back([values[i] for i in inputs]).leaves, leaves, len(values) - len(cts[-1]))


def push(
    back: Relay, primals: Sequence[Tensor], ones: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the derivative of the function in the direction of `tangents`, one for each differentiable result.

    None stands for zero.

    Args:
        back: the pullback of the forward.
        primals: of the forward.
        ones: like the function's differentiable results.
        tangents: one for each primal.
    """
    found = back.push(tangents)
    return pull(back, primals, [ones, tangents])[len(primals) :] if found is None else found
