"""A module of another framework as a `torch.nn.Module`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Container, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch._C._autograd import _top_saved_tensors_default_hooks  # private, as in native.py
from torch.nn.utils import parametrize

from polybridge.backends.torch.convert import lasting, spread_like, whole
from polybridge.backends.torch.source import AUTOCAST
from polybridge.core.bridge import Bridge
from polybridge.core.errors import (
    DetachedStateWarning,
    RandomnessError,
    UnbuiltError,
    warn,
)
from polybridge.core.functional import Ran, Slot, Weights
from polybridge.core.modules import ModuleLibrary
from polybridge.core.registry import registry
from polybridge.core.trees import flatten, unflatten

Tensor = torch.Tensor


def _no_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Keep torch's autocast from what a source calls of torch: its graphs would keep what they were traced with."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


class BridgedModule(torch.nn.Module):
    """A module of another framework: its weights are parameters, its state is buffers, under the source's names.

    `train()` and `eval()` say how it computes, and random numbers follow from torch's own seed. In `torch.autocast` a
    source that has a mode for it (Keras: mixed dtype policies) computes in it. Any other computes in its weights' own
    dtype, in which it also gets what autocast has narrowed.

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
        compute = self._autocast_dtype()
        if compute is not None and not self._bridge.functional.autocasts:
            args, kwargs = self._widened((args, kwargs), compute)
        with _no_autocast("cpu"), _no_autocast("cuda"):
            try:
                ran = self._run(args, kwargs, compute)
            except UnbuiltError:  # it had some weights, and was about to make others
                self._make(args, kwargs)
                ran = self._run(args, kwargs, compute)
        if self._bridge.functional.draws_unseen(self.training):
            self._refuse_recomputation()
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
        """Store these parameters and buffers in the source's module, bit for bit, and return it.

        Where FSDP has spread them over several processes, each of these has to call, and gets all values.
        """
        values = self._all(self._params) | self._all(self._state)
        return self._bridge.send({name: whole(x.detach()) for name, x in values.items()})

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
                    held = getattr(owner, last)
                    held.copy_(spread_like(value, held))

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

    def _autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of torch's autocast for the devices of the weights; None where it is off."""
        enabled = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
        if not enabled:
            return None
        kinds = {x.device.type for x in (*self.parameters(), *self.buffers())} or {"cpu"}
        return next((torch.get_autocast_dtype(kind) for kind in enabled if kind in kinds), None)

    def _widened(self, tree: Any, narrow: torch.dtype) -> Any:
        """Return arguments with what autocast has narrowed in the dtype of the weights."""
        floats = {x.dtype for x in self.parameters() if x.is_floating_point()} or {torch.float32}
        dtype = max(floats, key=lambda d: torch.finfo(d).bits)
        leaves, treedef = flatten(tree)
        return unflatten(treedef, [x.to(dtype) if isinstance(x, Tensor) and x.dtype == narrow else x for x in leaves])

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: torch.dtype | None) -> Ran:
        seed = _drawn() if self._bridge.random else None
        state = self._all(self._state)
        if torch.is_grad_enabled():  # a backward may need it as it was
            state = {name: x.clone() for name, x in state.items()}
        params = {name: lasting(x) for name, x in self._all(self._params).items()}
        autocasts = compute is not None and self._bridge.functional.autocasts
        mode = str(compute).removeprefix("torch.") if autocasts else None
        return self._bridge.run(Weights(params, state, seed, mode), self.training, args, kwargs)

    def _refuse_recomputation(self) -> None:
        """Refuse a checkpoint around numbers that do not follow from torch's generators, which it would restore."""
        hooks = _top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__:
            raise RandomnessError.recomputed(self._bridge.name, "checkpoint")
        self._bridge.refuse_recomputation(self.training, "CheckpointFunction.")  # private: the reentrant one (2.13)

    def _all(self, where: dict[str, str]) -> dict[str, Tensor]:
        return {name: operator.attrgetter(path)(self) for name, path in where.items()}

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make what the source makes at its first call."""
        library = registry.library("torch")
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


@torch.inference_mode(False)  # in which a first call may be made, while others train
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
    return torch.randint(2**32, (2,), dtype=torch.int64, device="cpu").to(torch.uint32)
