"""What a function reaches besides its arguments, under the names that its author gave."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any


def reachable(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function reaches, classes excepted.

    That is the function itself (as ""), what a partial gives to it, the object that it is a method of with its
    attributes, its defaults, and what its code reads from outside.
    """
    found: dict[str, Any] = {"": fn}
    while isinstance(fn, functools.partial):
        with contextlib.suppress(TypeError, ValueError):  # of a builtin, whose signature nobody knows
            found |= inspect.signature(fn.func).bind_partial(*fn.args).arguments
        found |= fn.keywords
        fn = fn.func
    code = inspect.unwrap(getattr(fn, "python_function", fn))
    owner = getattr(fn, "__self__", None if inspect.isfunction(code) else fn)
    if not isinstance(owner, (type, types.ModuleType, type(None))):  # a module is where a builtin is defined
        found |= {"self": owner, **{f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}}
    code = getattr(code, "__func__", code)
    if not inspect.isfunction(code) and callable(owner):
        code = type(owner).__call__
    if inspect.isfunction(code):
        captured = inspect.getclosurevars(code)
        parameters = inspect.signature(code).parameters.items()
        defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
        found = {**defaults, **found, **captured.globals, **captured.nonlocals}
    return {name: value for name, value in found.items() if not isinstance(value, type)}


def draws_alike(example: Callable[..., Any]) -> bool:
    """Whether a program of one example runs a module, whose random numbers follow from an input that examples share."""
    return is_module(getattr(getattr(example, "__self__", None), "fn", None))


def is_module(fn: Any) -> bool:
    """Whether a function is how a module is run."""
    return getattr(getattr(fn, "__self__", None), "held", None) is not None


def given(fn: Any) -> list[Any]:
    """Return the variables of a module whose values `fn` gets as inputs, if it is how a module is run."""
    return list(fn.__self__.held()) if is_module(fn) else []
