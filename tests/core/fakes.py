"""A backend over NumPy whose facts are arguments, so that a test can ask what the core does with them."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import numpy as np

import polybridge
from polybridge.core.registry import registry


class Memory:
    """A buffer: what it holds, how often it was written to, and which tensors refer to it."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.writes = 0
        self.users: weakref.WeakSet[Tensor] = weakref.WeakSet()


class Tensor:
    """A tensor on some memory; the memory is also its DLPack capsule."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        memory.users.add(self)

    @property
    def value(self) -> np.ndarray:
        return self.memory.value

    def write(self, number: float) -> None:
        self.memory.value[...] = number
        self.memory.writes += 1


class FakeBackend(polybridge.Backend):
    """A framework of its own, with its own type of tensors, that evaluates but does not differentiate."""

    def __init__(self, name: str = "fake", **facts: Any) -> None:
        self.name = name  # type: ignore[misc]
        self.tensor = type("Tensor", (Tensor,), {"__module__": name})
        self.dlpack = True  # type: ignore[misc]
        for fact, value in facts.items():
            setattr(self, fact, value)

    def is_tensor(self, value):
        return isinstance(value, self.tensor)

    def to_numpy(self, tensor):
        return tensor.value

    def from_numpy(self, array):
        return self.tensor(Memory(np.array(array)))

    def vjp(self, fn, primals):
        return fn(*primals), lambda cts: [None] * len(primals)

    def wrap_as_native(self, relay):
        return lambda *xs: relay(xs)

    def to_dlpack(self, tensor):
        return tensor.memory

    def from_dlpack(self, capsule):
        return self.tensor(capsule)

    def owns(self, tensor):
        return len(tensor.memory.users) == 1

    def reference(self, tensor):
        return self.tensor(tensor.memory)

    def version(self, tensor):
        return tensor.memory.writes

    def same(self, a, b):
        return a.value.tobytes() == b.value.tobytes()

    def full(self, number: float) -> Tensor:
        """Return a new tensor of two numbers."""
        return self.from_numpy(np.full(2, number))


def register(monkeypatch: Any, backend: polybridge.Backend, **plugin: Any) -> polybridge.Backend:
    """Make a backend known for the length of a test, as if its framework were imported."""
    registry.find()
    module = f"{backend.name}_framework"
    for table in ("plugins", "names", "loaded"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setitem(__import__("sys").modules, module, ModuleType(module))
    plugin = {"name": backend.name, "load": lambda: backend, "module": module} | plugin
    registry.register(polybridge.BackendPlugin(**plugin))
    registry.loaded[backend.name] = backend
    return backend
