"""Finds, names and lazily loads backends; keeps broken plugins aside, by name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pluggy

from polybridge.core import hookspecs
from polybridge.core.backend import Backend
from polybridge.core.errors import BackendError, BackendNotInstalledError, BrokenPluginError, UnknownBackendError
from polybridge.core.hookspecs import BackendPlugin


@dataclass
class Registry:
    """The backends of this process; the one in use is `registry`."""

    plugins: dict[str, BackendPlugin] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    broken: dict[str, tuple[str, BaseException]] = field(default_factory=dict)
    loaded: dict[str, Backend] = field(default_factory=dict)
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

    def register(self, plugin: BackendPlugin) -> None:
        """Add one backend, replacing an earlier one of the same name."""
        with self._lock:
            self.plugins[plugin.name] = plugin
            self.loaded.pop(plugin.name, None)
            for name in (plugin.name, *plugin.aliases):
                self.names[name] = plugin.name

    def get(self, name: str) -> Backend:
        """Return the backend called `name`, importing its framework if this is the first time."""
        self.find()
        canonical = self.names.get(name)
        if canonical is None:
            raise self._unknown(name) from self.broken.get(name, (None, None))[1]
        backend = self.loaded.get(canonical)
        return self._load(canonical) if backend is None else backend

    def owner(self, value: Any) -> Backend | None:
        """Return the backend that `value` is a tensor of, or made of tensors of; None if there is none.

        Imports no framework.
        """
        self.find()
        for name in self._imported():
            try:
                backend = self.get(name)
            except BackendError:  # nothing that a backend which cannot be loaded could have made
                continue
            if backend.is_tensor(value) or backend.is_composite(value):
                return backend
        return None

    def _imported(self) -> Iterator[str]:
        """Yield the backends whose framework is imported: no tensor of another can exist."""
        return (name for name, plugin in list(self.plugins.items()) if sys.modules.get(plugin.module) is not None)

    def _find_one(self, manager: pluggy.PluginManager, entry: importlib.metadata.EntryPoint) -> None:
        source = entry.dist.name if entry.dist is not None else entry.value
        try:
            before = set(map(id, manager.hook.polybridge_backends.get_hookimpls()))
            manager.register(entry.load(), name=f"{source}:{entry.name}")
            manager.check_pending()
            for impl in manager.hook.polybridge_backends.get_hookimpls():
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

    def _unknown(self, name: str) -> Exception:
        if name in self.broken:
            source, error = self.broken[name]
            return BrokenPluginError.of(name, source, error)
        return UnknownBackendError.named(name, self.names, self.broken)


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
