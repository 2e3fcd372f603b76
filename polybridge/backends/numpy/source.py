"""How NumPy evaluates its own functions. It differentiates none: `wrap` has to be told how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polybridge.backends.numpy.convert import Array
from polybridge.core.backend import NoPullback, Pullback
from polybridge.core.errors import NotDifferentiableError


def vjp(fn: Callable[..., Sequence[Array]], primals: Sequence[Array]) -> tuple[Sequence[Array], Pullback]:
    """Evaluate `fn` and return a pullback that raises when it is called."""
    return fn(*primals), NoPullback(NotDifferentiableError.without_rule("a NumPy function", "numpy"))
