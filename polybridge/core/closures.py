"""What a function reaches besides its arguments, under the names that its author gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def reachable(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the function itself (as ""), the object that it is a method of, and what its code reads from outside."""
    found: dict[str, Any] = {"": fn}
    if hasattr(fn, "__self__"):
        found["self"] = fn.__self__
    code = inspect.unwrap(getattr(fn, "python_function", fn))
    if inspect.isfunction(code):
        captured = inspect.getclosurevars(code)
        found |= {**captured.globals, **captured.nonlocals}
    return found


def draws_alike(example: Callable[..., Any]) -> bool:
    """Whether a program of one example runs a module, whose random numbers follow from an input that examples share."""
    fn = getattr(getattr(example, "__self__", None), "fn", None)
    return getattr(getattr(fn, "__self__", None), "held", None) is not None


def given(fn: Callable[..., Any]) -> list[Any]:
    """Return the variables of a module whose values `fn` gets as inputs, if it is how a module is run."""
    held = getattr(getattr(fn, "__self__", None), "held", None)
    return [] if held is None else list(held())
