"""A module with weights and state, as a pure function of both and as another framework holds it.

A source gives each of its modules as a `Functional`: named slots, and a function that computes with the values it is
given for them. A destination holds these values as its own variables; at every call it passes them, through the same
relay as any other function's arguments, and stores what the call has changed. So the destination's variables are what
the source computes with, and the source's own are not touched until `send`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from polybridge.core.backend import Backend
from polybridge.core.bridge import Bridge
from polybridge.core.functional import Functional, Slot


class ModuleLibrary(ABC):
    """How a framework's modules become functions, and how it holds a module of another."""

    name: ClassVar[str]
    """The canonical name, as given to `wrap(src=..., dst=...)`."""
    classes: tuple[type, ...] = ()
    """Those whose instances are modules, so that a class in place of a module is an error."""
    builds: ClassVar[bool] = False
    """Whether `native` takes modules that make their weights at the first call, and calls `Bridge.build` then."""

    def __init__(self, backend: Backend) -> None:
        """Begin without variables.

        Args:
            backend: of the library's tensors.
        """
        self.backend = backend
        self.shared = SharedVariables()

    def __deepcopy__(self, _: Any) -> ModuleLibrary:
        """Return the library itself, which native modules may refer to."""
        return self

    @abstractmethod
    def functional(self, value: Any) -> Functional | None:
        """Return a module of this library as a function; None if `value` is no such module."""

    @abstractmethod
    def native(self, bridge: Bridge) -> Any:
        """Return a module of this library that holds the weights and computes with the source.

        It may take keyword arguments, which `wrap` hands on, as those of its own modules: `name=` of a Keras layer.
        """


class SharedVariables:
    """The destination's variable for each variable of a source, while both are alive: what is tied stays tied."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[int, tuple[Callable[[], Any], weakref.ref[Any]]] = {}

    def get(self, slot: Slot, make: Callable[[], Any]) -> Any:
        """Return the variable of a slot, made if nobody has it."""
        if slot.holder is None:
            return make()
        holder, variable = self._known.get(id(slot.holder), (_dead, _dead))
        found = variable() if holder() is slot.holder else None
        if found is None:
            found = make()
            self._remember(slot.holder, found)
        return found

    def _remember(self, holder: Any, variable: Any) -> None:
        key = id(holder)

        def forget(_: Any) -> None:
            self._known.pop(key, None)

        try:
            self._known[key] = weakref.ref(holder, forget), weakref.ref(variable)
        except TypeError:  # a class without weak references, such as Flax's: kept while the destination's lives
            self._known[key] = lambda: holder, weakref.ref(variable, forget)


def _dead() -> None:
    return None
