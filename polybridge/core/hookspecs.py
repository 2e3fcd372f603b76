"""The hooks through which a backend or a library of modules, built in or not, makes itself known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

PROJECT = "polybridge"
"""The pluggy project and the entry point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class BackendPlugin:
    """What a plugin says of its backend before the framework is imported.

    Args:
        name: the canonical name, as in `wrap(src=name)`.
        load: imports the framework and returns the `Backend`; called once, when it is first needed.
        module: the framework's top-level module; values are only shown to the backend once it is imported.
        aliases: other names.
        requirement: what pip has to install when the framework is missing.
    """

    name: str
    load: Callable[[], Any]
    module: str
    aliases: tuple[str, ...] = ()
    requirement: str = ""


@dataclass(frozen=True)
class ModulePlugin:
    """What a plugin says of a library of modules before it is imported.

    Args:
        name: the canonical name, as in `wrap(dst=name)`.
        load: given the backend, imports the library and returns the `ModuleLibrary`; called once, when it is needed.
        module: the top-level module that has to be imported before a module of the library can exist.
        backend: the name of the backend whose tensors it uses.
        aliases: other names.
        requirement: what pip has to install when it is missing.
    """

    name: str
    load: Callable[[Any], Any]
    module: str
    backend: str
    aliases: tuple[str, ...] = ()
    requirement: str = ""


@hookspec
def polybridge_backends() -> list[BackendPlugin]:  # type: ignore[empty-body]
    """Return the backends of this plugin."""


@hookspec
def polybridge_modules() -> list[ModulePlugin]:  # type: ignore[empty-body]
    """Return the libraries of modules of this plugin."""
