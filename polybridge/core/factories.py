"""Names functions, so that a file can say how to build a module again."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polybridge.core.errors import FactoryError

Factory = Callable[..., Any]

_registered: dict[str, Factory] = {}


def register_factory(name: str, fn: Factory) -> Factory:
    """Give a function a name under which saved files find it, and return it; a later one of the same name replaces it.

    For functions that no import finds, such as a lambda. Whoever loads the file has to register it first.

    Raises:
        FactoryError: `fn` is not callable.
    """
    if not callable(fn):
        raise FactoryError.not_callable(fn)
    _registered[name] = fn
    return fn


def reference(factory: Factory) -> dict[str, Any]:
    """Return what finds a factory again, as JSON can hold it.

    Args:
        factory: a function or class that is registered or that an import finds by its qualified name, or a
            `functools.partial` of one whose arguments JSON can hold.

    Returns:
        `{"registered": name}` or `{"import": "module:qualified.name"}`, for a partial with `"args"` and `"kwargs"`.

    Raises:
        FactoryError: it is none of these.
    """
    if isinstance(factory, functools.partial):
        given = {"args": list(factory.args), "kwargs": dict(factory.keywords)}
        if not _is_json(given):
            raise FactoryError.arguments(factory)
        return {**reference(factory.func), **given}
    for name, fn in list(_registered.items()):
        if fn is factory:
            return {"registered": name}
    module, qualname = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    try:
        if module is not None and qualname is not None and _found(sys.modules[module], qualname) is factory:
            return {"import": f"{module}:{qualname}"}
    except (AttributeError, KeyError):
        pass
    raise FactoryError.unnamed(factory)


def resolve(ref: Mapping[str, Any]) -> Factory:
    """Return the factory of a reference. It imports what the reference names: do not resolve one that you do not trust.

    Raises:
        FactoryError: nothing of that name is registered or can be imported.
    """
    try:
        if "registered" in ref:
            factory = _registered[ref["registered"]]
        else:
            module, _, qualname = ref["import"].partition(":")
            factory = _found(importlib.import_module(module), qualname)
    except (AttributeError, ImportError, KeyError) as error:
        raise FactoryError.unknown(ref, error) from error
    return functools.partial(factory, *ref["args"], **ref["kwargs"]) if "args" in ref else factory


def _found(module: Any, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), module)


def _is_json(value: Any) -> bool:
    """Whether JSON gives back what it is given (a tuple comes back as a list, the keys of a dict as strings)."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
