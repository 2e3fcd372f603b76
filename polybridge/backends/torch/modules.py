"""torch's modules as pure functions, and the modules of others as `torch.nn.Module`s."""

from __future__ import annotations

import contextlib
import copy
import operator
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # private, as in source.py
from torch.nn.utils import parametrize

from polybridge.core.backend import Backend
from polybridge.core.errors import DetachedStateWarning, UnbuiltError, warn
from polybridge.core.modules import Bridge, Functional, ModuleLibrary, Ran, Slot, Weights
from polybridge.core.registry import registry

Tensor = torch.Tensor


class TorchModules(ModuleLibrary):
    """`torch.nn`."""

    name = "torch"
    builds = True

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
        state = {name: x.detach().clone() for name, x in _weights.state.items()}
        given = {**_weights.params, **state}
        versions = {name: x._version for name, x in state.items()}
        with self._borrowed() as module, self._in_mode(module, _training), _seeded(_weights.seed):
            out = torch.func.functional_call(module, given, args, kwargs)
        changed = {
            name: given[name] for name, x in state.items() if given[name] is not x or x._version != versions[name]
        }
        return out, {name: x.detach() for name, x in changed.items()}

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


@contextlib.contextmanager
def _seeded(seed: Tensor | None) -> Iterator[None]:
    """Draw random numbers that follow from a seed, and leave torch's own generators as they were."""
    if seed is None or isinstance(seed, FakeTensor):
        yield
        return
    high, low = seed.tolist()
    with torch.random.fork_rng():
        torch.manual_seed(high << 32 | low)
        yield


class BridgedModule(torch.nn.Module):
    """A module of another framework: its weights are parameters, its state is buffers, under the source's names.

    `train()` and `eval()` say how it computes, and random numbers follow from torch's own seed.

    Attributes:
        losses: what the last call adds to the loss besides, such as regularisers: scalars, differentiable.
    """

    def __init__(self, bridge: Bridge, library: ModuleLibrary) -> None:
        """Make a parameter or buffer of each slot, now or, where the source makes them late, at the first call."""
        super().__init__()
        self.losses: list[Tensor] = []
        self._bridge = bridge
        self._params: dict[str, str] = {}  # the source's names to where they are here
        self._state: dict[str, str] = {}
        self._parts: list[Part] = []
        self._is_copy = False
        self._hold(bridge.slots, library)
        self._made = bridge.built
        if not self._made:
            self._parameters = _Unmade(bridge.name, self._parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the source's module with these parameters and buffers, and store what it changes of the buffers."""
        if not self._made:
            self._make(args, kwargs)
        for part in self._parts:
            part.prepare()
        try:
            ran = self._run(args, kwargs)
        except UnbuiltError:  # it had some weights, and was about to make others
            self._make(args, kwargs)
            ran = self._run(args, kwargs)
        if ran.losses or self.losses:
            self.losses = list(ran.losses)
        with torch.no_grad():
            for name, value in ran.changed.items():
                if name in self._state:
                    operator.attrgetter(self._state[name])(self).copy_(value)
                else:  # the backward needs the memory that the call has read
                    operator.attrgetter(self._params[name])(self).data = value.detach()
        return ran.result

    def sync_to_source(self) -> Any:
        """Store these parameters and buffers in the source's module, bit for bit, and return it."""
        values = self._all(self._params) | self._all(self._state)
        return self._bridge.send({name: x.detach() for name, x in values.items()})

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        where = self._params | self._state
        for slot in self._bridge.slots:
            path, _, last = where[slot.name].rpartition(".")
            owner, value = self.get_submodule(path), self._bridge.fetch(slot)
            with torch.no_grad():
                if parametrize.is_parametrized(owner, last):
                    setattr(owner, last, value)
                else:
                    getattr(owner, last).copy_(value)

    def extra_repr(self) -> str:
        """Say what it bridges."""
        return f"{self._bridge.name}, src={self._bridge.functional.backend.name!r}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last call's losses out of copies and files: they have a history."""
        return {**self.__dict__, "losses": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be another module than that which was copied: what it makes late is its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._is_copy = True

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        seed = _drawn() if self._bridge.random else None
        state = self._all(self._state)
        if torch.is_grad_enabled():  # a backward may need it as it was
            state = {name: x.clone() for name, x in state.items()}
        return self._bridge.run(Weights(self._all(self._params), state, seed), self.training, args, kwargs)

    def _all(self, where: dict[str, str]) -> dict[str, Tensor]:
        return {name: operator.attrgetter(path)(self) for name, path in where.items()}

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make what the source makes at its first call."""
        library = registry.library(TorchModules.name)
        assert library is not None
        if self._made or not self._bridge.built:  # another copy may have called it first
            self._bridge.build(args, kwargs)
        new = [slot for slot in self._bridge.slots if slot.name not in self._params and slot.name not in self._state]
        late = [slot.name for slot in new if not slot.is_state]
        if self._made and late:
            warn(DetachedStateWarning.late(self._bridge.name, late))
        if isinstance(self._parameters, _Unmade):
            self._parameters = self._parameters.made
        self._made = True
        self._hold(new, library)

    def _hold(self, slots: Iterable[Slot], library: ModuleLibrary) -> None:
        """Make a parameter or buffer of each slot."""
        for slot in slots:
            make = partial(_holder, self._bridge, slot)
            tensor: Any = make() if self._is_copy else library.shared.get(slot, make)
            *path, last = slot.name.split(".")
            owner: torch.nn.Module = self
            where = []
            for name in path:
                name = _free(owner, name, owner._parameters, owner._buffers)
                if name not in owner._modules:
                    self._parts.append(Part())
                    owner.add_module(name, self._parts[-1])
                where.append(name)
                owner = owner.get_submodule(name)
            last = _free(owner, last, owner._parameters, owner._buffers, owner._modules)
            if slot.is_state:
                owner.register_buffer(last, tensor)
            else:
                owner.register_parameter(last, tensor)
            (self._state if slot.is_state else self._params)[slot.name] = ".".join([*where, last])


class Part(torch.nn.Module):
    """Some of a bridged module's weights, under their common name; the whole is called, never this."""

    def prepare(self) -> None:
        """Run the hooks that compute weights before a call, such as those of `torch.nn.utils.prune`."""
        for number, hook in list(self._forward_pre_hooks.items()):
            if number in self._forward_pre_hooks_with_kwargs:
                hook(self, (), {})
            else:
                hook(self, ())


class _Unmade(dict[str, Any]):
    """Parameters that the first call makes. Who lists them before would miss them, and is told."""

    def __init__(self, name: str, made: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.made = name, made

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unmade, (self.name, self.made)

    def __iter__(self) -> Iterator[str]:
        raise UnbuiltError.before_call(self.name)

    def items(self) -> Any:
        raise UnbuiltError.before_call(self.name)

    values = keys = items


def _holder(bridge: Bridge, slot: Slot) -> Tensor:
    value = bridge.fetch(slot)
    if slot.is_state:
        return value
    differentiable = value.is_floating_point() or value.is_complex()
    return torch.nn.Parameter(value, requires_grad=slot.trainable and differentiable)


def _free(owner: torch.nn.Module, name: str, *taken: Container[str]) -> str:
    """Return a name that is none of a module's own attributes, and not taken otherwise."""
    while hasattr(type(owner), name) or name in owner.__dict__ or any(name in names for names in taken):
        name += "_"
    return name


def _drawn() -> Tensor:
    return torch.randint(2**32, (2,), dtype=torch.int64).to(torch.uint32)
