"""torch's modules as pure functions, and the modules of others as `torch.nn.Module`s."""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # private, as in source.py
from torch.utils._python_dispatch import TorchDispatchMode  # private, as in source.py

from polybridge.backends.torch import source
from polybridge.core.backend import Backend
from polybridge.core.errors import RandomnessError
from polybridge.core.modules import Bridge, Functional, ModuleLibrary, Slot, Weights

Tensor = torch.Tensor


class TorchModules(ModuleLibrary):
    """`torch.nn`."""

    name = "torch"

    def functional(self, value: Any) -> Functional | None:
        """Return an `nn.Module` as a function."""
        if not isinstance(value, torch.nn.Module):
            return None
        return TorchFunctional(value, self.backend)

    def native(self, bridge: Bridge) -> BridgedModule:
        """Return an `nn.Module`."""
        return BridgedModule(bridge, self)


class TorchFunctional(Functional):
    """An `nn.Module` as a function of its parameters and buffers.

    Trained as it was wrapped: a submodule in evaluation mode inside of a module in training mode stays so.
    """

    def __init__(self, module: torch.nn.Module, backend: Backend) -> None:
        """Name the parameters and buffers."""
        self.backend, self.module, self.name = backend, module, type(module).__name__
        self.slots = [
            *(Slot(name, p, False, p.requires_grad) for name, p in module.named_parameters()),
            *(Slot(name, b, True, False) for name, b in module.named_buffers()),
        ]
        self._trained = [not module.training or inner.training for inner in module.modules()]
        self._using = threading.Lock()
        self.built = not any(torch.nn.parameter.is_lazy(slot.holder) for slot in self.slots)

    def read(self, slot: Slot) -> Tensor:
        """Return the values of a parameter or buffer."""
        holder: Tensor = slot.holder
        return holder.detach()

    def write(self, values: Mapping[str, Tensor]) -> torch.nn.Module:
        """Write to the parameters and buffers in place."""
        with torch.no_grad():
            for slot in self.slots:
                if slot.name in values:
                    slot.holder.copy_(values[slot.name])
        module: torch.nn.Module = self.module
        return module

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the module with other tensors in the places of its own."""
        kept = {name: x.detach() for name, x in _weights.state.items()}
        state = {slot.name: _own(kept[slot.name], slot.holder.dtype) for slot in self.slots if slot.is_state}
        given = {**_weights.params, **kept, **state}
        with self._borrowed() as module, self._in_mode(module, _training), self._drawing(_weights.seed):
            out = torch.func.functional_call(module, given, args, kwargs)
        # All of it: batch normalisation writes past the version counters, so that nobody can tell what has changed.
        return out, {name: given[name].detach() for name in state}

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[torch.nn.Module]:
        """Give the module itself, or if another call computes with it a copy that shares its tensors."""
        if self._using.acquire(blocking=False):
            try:
                yield self.module
            finally:
                self._using.release()
        else:
            memo = {id(slot.holder): slot.holder for slot in self.slots}
            yield copy.deepcopy(self.module, memo)

    def _drawing(self, seed: Tensor | None) -> contextlib.AbstractContextManager[None]:
        if seed is not None:
            return _seeded(seed)
        return _RefusedDraws(self.name) if source.fake_mode() is not None else _noticing_draws(self.name)

    @contextlib.contextmanager
    def _in_mode(self, module: torch.nn.Module, training: bool) -> Iterator[None]:
        modules = list(module.modules())
        before = [inner.training for inner in modules]
        for inner, trained in zip(modules, self._trained, strict=True):
            inner.training = training and trained
        try:
            yield
        finally:
            for inner, was in zip(modules, before, strict=True):
                inner.training = was


def _own(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a buffer for a call to write to; integers in their own dtype, which a caller may have cut."""
    return buffer.clone() if buffer.is_floating_point() or buffer.is_complex() else buffer.to(dtype, copy=True)


@contextlib.contextmanager
def _noticing_draws(call: str) -> Iterator[None]:
    """Raise a RandomnessError after a call that has drawn from torch's own generators."""
    before = source.randomness()
    yield
    if not before.is_current():
        raise RandomnessError.unseeded(call)


class _RefusedDraws(TorchDispatchMode):
    """Raises a RandomnessError where a call on placeholders draws, which moves no generator."""

    def __init__(self, call: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention is marked as random for the dropout inside of it, which may be none: the run will show.
        if torch.Tag.nondeterministic_seeded in func.tags and "dropout_p" not in str(func._schema):
            raise RandomnessError.unseeded(self._call)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _seeded(seed: Tensor) -> Iterator[None]:
    """Draw random numbers that follow from a seed, and leave torch's own generators as they were."""
    if isinstance(seed, FakeTensor):
        yield
        return
    high, low = seed.tolist()
    with torch.random.fork_rng():
        torch.manual_seed(high << 32 | low)
        yield


class BridgedModule(torch.nn.Module):
    """A module of another framework: its weights are parameters, its state is buffers, under the source's names.

    `train()` and `eval()` say how it computes, and random numbers follow from torch's own seed.
    """

    def __init__(self, bridge: Bridge, library: ModuleLibrary) -> None:
        """Make a parameter or buffer of each slot."""
        super().__init__()
        self._bridge = bridge
        self._params: dict[str, str] = {}  # the source's names to where they are here
        self._state: dict[str, str] = {}
        for slot in bridge.slots:
            tensor = library.shared.get(slot, partial(_holder, bridge, slot))
            *path, last = slot.name.split(".")
            owner: torch.nn.Module = self
            where = []
            for name in path:
                name = _free(owner, name)
                if name not in owner._modules:
                    owner.add_module(name, torch.nn.Module())
                where.append(name)
                owner = owner.get_submodule(name)
            last = _free(owner, last)
            if slot.is_state:
                owner.register_buffer(last, tensor)
            else:
                owner.register_parameter(last, tensor)
            (self._state if slot.is_state else self._params)[slot.name] = ".".join([*where, last])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the source's module with these parameters and buffers, and store what it changes of the buffers."""
        seed = _drawn() if self._bridge.random else None
        state = {name: x.clone() for name, x in self._all(self._state).items()}  # a backward may need it as it was
        out, changed = self._bridge(Weights(self._all(self._params), state, seed), self.training, args, kwargs)
        with torch.no_grad():
            for name, value in changed.items():
                operator.attrgetter(self._state[name])(self).copy_(value)
        return out

    def sync_to_source(self) -> Any:
        """Store these parameters and buffers in the source's module, bit for bit, and return it."""
        values = self._all(self._params) | self._all(self._state)
        return self._bridge.send({name: x.detach() for name, x in values.items()})

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        where = self._params | self._state
        with torch.no_grad():
            for slot in self._bridge.slots:
                operator.attrgetter(where[slot.name])(self).copy_(self._bridge.fetch(slot))

    def extra_repr(self) -> str:
        """Say what it bridges."""
        return f"{self._bridge.name}, src={self._bridge.functional.backend.name!r}"

    def _all(self, where: dict[str, str]) -> dict[str, Tensor]:
        return {name: operator.attrgetter(path)(self) for name, path in where.items()}


def _holder(bridge: Bridge, slot: Slot) -> Tensor:
    value = bridge.fetch(slot)
    return value if slot.is_state else torch.nn.Parameter(value, requires_grad=slot.trainable)


def _free(owner: torch.nn.Module, name: str) -> str:
    """Return a name that is none of a module's own attributes."""
    while hasattr(torch.nn.Module, name) or (name in owner.__dict__):
        name += "_"
    return name


def _drawn() -> Tensor:
    return torch.randint(2**32, (2,), dtype=torch.int64).to(torch.uint32)
