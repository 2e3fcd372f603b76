"""Finds, names and lazily loads backends; keeps broken plugins aside, by name."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pluggy

from polybridge.core import hookspecs
from polybridge.core.backend import Backend
from polybridge.core.errors import (
    BackendError,
    BackendNotInstalledError,
    BrokenPluginError,
    NotCallableError,
    UnknownBackendError,
)
from polybridge.core.functional import Functional
from polybridge.core.hookspecs import BackendPlugin, ModulePlugin
from polybridge.core.modules import ModuleLibrary


@dataclass
class Registry:
    """The backends and libraries of modules of this process; the one in use is `registry`."""

    plugins: dict[str, BackendPlugin] = field(default_factory=dict)
    module_plugins: dict[str, ModulePlugin] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    module_names: dict[str, str] = field(default_factory=dict)
    broken: dict[str, tuple[str, BaseException]] = field(default_factory=dict)
    loaded: dict[str, Backend] = field(default_factory=dict)
    libraries: dict[str, ModuleLibrary] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _found: bool = False

    def find(self) -> None:
        """Read every entry point of the group, each by itself, and ask the plugins for their backends; once."""
        if self._found:
            return
        with self._lock:
            if self._found:
                return
            manager = pluggy.PluginManager(hookspecs.PROJECT)
            manager.add_hookspecs(hookspecs)
            for entry in sorted(importlib.metadata.entry_points(group=hookspecs.PROJECT), key=_strangers_last):
                self._find_one(manager, entry)
            self._found = True

    def register(self, plugin: BackendPlugin | ModulePlugin) -> None:
        """Add one backend or library of modules, replacing an earlier one of the same name."""
        with self._lock:
            if isinstance(plugin, ModulePlugin):
                self.module_plugins[plugin.name] = plugin
                self.libraries.pop(plugin.name, None)
                names = self.module_names
            else:
                self.plugins[plugin.name] = plugin
                self.loaded.pop(plugin.name, None)
                names = self.names
            for name in (plugin.name, *plugin.aliases):
                names[name] = plugin.name

    def get(self, name: str) -> Backend:
        """Return the backend called `name`, or that of the library of this name, importing its framework if need be."""
        self.find()
        if not isinstance(name, str):
            raise self._unknown(name)
        canonical = self.names.get(name)
        if canonical is None and name in self.module_names:
            canonical = self.names.get(self.module_plugins[self.module_names[name]].backend)
        if canonical is None:
            raise self._unknown(name) from self.broken.get(name, (None, None))[1]
        backend = self.loaded.get(canonical)
        return self._load(canonical) if backend is None else backend

    def library(self, name: str) -> ModuleLibrary | None:
        """Return the library of modules called `name`; None if there is only a backend of this name, or nothing."""
        self.find()
        canonical = self.module_names.get(name) if isinstance(name, str) else None
        if canonical is None:
            return None
        library = self.libraries.get(canonical)
        return self._load_library(canonical) if library is None else library

    def functional(self, value: Any) -> tuple[ModuleLibrary, Functional] | None:
        """Return the library that `value` is a module of, and the module as a function; None if there is none.

        Imports no library. Those that are named after their backend are asked last: others build on their classes.

        Raises:
            NotCallableError: it is the class of modules.
        """
        if isinstance(value, _FUNCTIONS):
            return None
        self.find()
        for name, plugin in sorted(self.module_plugins.items(), key=lambda item: item[1].backend == item[0]):
            if sys.modules.get(plugin.module) is None:
                continue
            library = self.library(name)
            if library is not None and isinstance(value, type) and issubclass(value, library.classes):
                raise NotCallableError.of_modules(value)
            functional = None if library is None else library.functional(value)
            if library is not None and functional is not None:
                return library, functional
        return None

    def owner(self, value: Any) -> Backend | None:
        """Return the backend that `value` is a tensor of, or made of tensors of; None if there is none.

        Imports no framework.
        """
        return next((b for b in self._possible() if b.is_tensor(value) or b.is_composite(value)), None)

    def is_tree(self, value: Any) -> bool:
        """Return whether `value` is a container to a backend whose framework is imported."""
        return any(backend.is_tree(value) for backend in self._possible())

    def _possible(self) -> Iterator[Backend]:
        """Yield the backends that may know a value."""
        self.find()
        for name in self._imported():
            try:
                backend = self.get(name)
            except BackendError:  # nothing that a backend which cannot be loaded could have made
                continue
            yield backend

    def _imported(self) -> Iterator[str]:
        """Yield the backends whose framework is imported: no tensor of another can exist."""
        return (name for name, plugin in list(self.plugins.items()) if sys.modules.get(plugin.module) is not None)

    def _find_one(self, manager: pluggy.PluginManager, entry: importlib.metadata.EntryPoint) -> None:
        source = entry.dist.name if entry.dist is not None else entry.value
        try:
            hooks = manager.hook.polybridge_backends, manager.hook.polybridge_modules
            before = {id(impl) for hook in hooks for impl in hook.get_hookimpls()}
            manager.register(entry.load(), name=f"{source}:{entry.name}")
            manager.check_pending()
            for hook in hooks:
                for impl in hook.get_hookimpls():
                    if id(impl) not in before:
                        offered: Any = impl.function()
                        for plugin in offered:
                            self.register(plugin)
        except Exception as error:  # one broken plugin must not take the others along
            manager.unregister(name=f"{source}:{entry.name}")
            self.broken[entry.name] = (source, error)

    def _load(self, name: str) -> Backend:
        plugin = self.plugins[name]
        if importlib.util.find_spec(plugin.module) is None:
            raise BackendNotInstalledError.of(name, plugin.requirement or plugin.module)
        source = getattr(plugin.load, "__module__", "?")
        try:
            backend = plugin.load()
        except Exception as error:
            raise BrokenPluginError.of(name, source, error) from error
        if not isinstance(backend, Backend):
            raise BrokenPluginError.of(name, source, TypeError(f"load() returned {backend!r}, not a Backend instance"))
        with self._lock:  # taken after the import: a framework's import may take locks of its own
            loaded: Backend = self.loaded.setdefault(name, backend)
        return loaded

    def _load_library(self, name: str) -> ModuleLibrary:
        plugin = self.module_plugins[name]
        if importlib.util.find_spec(plugin.module) is None:
            raise BackendNotInstalledError.of(name, plugin.requirement or plugin.module)
        try:
            library = plugin.load(self.get(plugin.backend))
        except BackendError:
            raise
        except Exception as error:
            raise BrokenPluginError.of(name, getattr(plugin.load, "__module__", "?"), error) from error
        with self._lock:
            loaded: ModuleLibrary = self.libraries.setdefault(name, library)
        return loaded

    def _unknown(self, name: Any) -> Exception:
        if isinstance(name, str) and name in self.broken:
            source, error = self.broken[name]
            return BrokenPluginError.of(name, source, error)
        return UnknownBackendError.named(name, {*self.names, *self.module_names}, self.broken)


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)  # no modules


def _strangers_last(entry: importlib.metadata.EntryPoint) -> tuple[bool, str]:
    """Order the built-in backends first, so that a third party can replace one."""
    return (entry.dist is not None and entry.dist.name != hookspecs.PROJECT, entry.name)


registry = Registry()


def get_backend(name: str) -> Backend:
    """Return the backend called `name` (or by an alias), importing its framework at the first call.

    Raises:
        UnknownBackendError: nobody has registered this name; the message lists near ones.
        BackendNotInstalledError: its framework is not installed; the message has the pip command.
        BrokenPluginError: its plugin failed to load.
    """
    return registry.get(name)


def list_backends() -> list[str]:
    """Return the canonical names of the registered backends, whether or not their framework is installed."""
    registry.find()
    return sorted(registry.plugins)
