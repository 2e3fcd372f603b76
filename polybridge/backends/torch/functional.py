"""torch's modules as pure functions of their parameters and buffers."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode  # private, as in source.py

from polybridge.backends.torch.checkpoints import noticing
from polybridge.backends.torch.convert import same, torch_dtype
from polybridge.backends.torch.source import fake_mode
from polybridge.core.backend import Backend
from polybridge.core.errors import (
    DetachedStateWarning,
    UnsupportedModuleError,
    WeightsError,
    warn,
)
from polybridge.core.functional import Functional, Slot, Weights

Tensor = torch.Tensor


class TorchFunctional(Functional):
    """An `nn.Module` as a function of its parameters and buffers.

    Trained as it was wrapped: a submodule in evaluation mode inside of a module in training mode stays so, and one in
    training mode inside of a module in evaluation mode. Its hooks run as they do natively.
    """

    autocasts = True

    def __init__(self, module: torch.nn.Module, backend: Backend) -> None:
        """Name the parameters and buffers.

        Raises:
            UnsupportedModuleError: TorchScript has compiled it, with its parameters.
        """
        if any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules()):
            raise UnsupportedModuleError.scripted(type(module).__name__)
        # What `torch.compile` makes computes with the parameters that it has seen, or compiles again for each others.
        original = getattr(module, "_orig_mod", None)
        self.module = original if isinstance(original, torch.nn.Module) else module
        self.backend, self.name = backend, type(self.module).__name__
        self._drawn: dict[bool, bool] = {}  # by training
        self._using = threading.Lock()
        self._thread: int | None = None  # that computes with it
        self._find()

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Give lazy parameters the shapes that these arguments ask for, as the module's first call does."""
        training = [inner.training for inner in self._modules]
        try:
            with torch.no_grad():
                self.module.eval()(*args, **kwargs)
        finally:
            for inner, was in zip(self._modules, training, strict=True):
                inner.training = was
        self._find()

    def _find(self) -> None:
        module = self.module
        self._modules = list(module.modules())
        self._modes = {True: self._mode(training=True), False: self._mode(training=False)}
        self.slots = [
            *(Slot(name, p, False, p.requires_grad) for name, p in module.named_parameters()),
            *(Slot(name, b, True, False) for name, b in module.named_buffers()),
        ]
        self.built = not any(is_lazy(slot.holder) for slot in self.slots)
        self._places = _places(module)
        self._structure = [_structure(inner) for inner in self._modules]
        self._held: dict[str, Tensor] = {slot.name: slot.holder for slot in self.slots}

    def _mode(self, training: bool) -> list[bool]:
        """Return which submodules compute as while training."""
        if self.module.training == training:
            return [inner.training for inner in self._modules]
        overridden = training and any(type(inner).train is not torch.nn.Module.train for inner in self._modules)
        if not overridden:
            return [training] * len(self._modules)
        before = [inner.training for inner in self._modules]
        try:  # its own `train` may leave some of them out, such as frozen batch normalisation
            return [inner.training for inner in self.module.train().modules()]
        finally:
            self.module.eval()
            for inner, was in zip(self._modules, before, strict=True):
                inner.training = was

    def read(self, slot: Slot) -> Tensor:
        """Return the values of a parameter or buffer.

        Raises:
            WeightsError: the module has other layers or weights than it had.
        """
        return self._current()[slot.name].detach()

    def write(self, values: Mapping[str, Tensor]) -> torch.nn.Module:
        """Write to the parameters and buffers in place.

        Raises:
            WeightsError: the module has other layers or weights than it had.
        """
        held = self._current()
        with torch.no_grad():
            for name, value in values.items():
                held[name].copy_(value)
        module: torch.nn.Module = self.module
        return module

    def held(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers that the module has now."""
        return iter(self._held.values())

    def _current(self) -> dict[str, Tensor]:
        """Return what the module has in its places now: whoever uses it may have put other tensors there."""
        if self._using.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._using.release()
        return self._held  # while another call computes, as it found them

    def _look(self) -> None:
        """Find the tensors in the module's places, when no call has put others there.

        Raises:
            WeightsError: there are other places than there were.
        """
        structure = [_structure(inner) for inner in self._modules]
        if structure != self._structure:
            self._adopt(structure)
        held: dict[str, Tensor] = {}
        for name, owners in self._places:
            tensors = [
                (inner._parameters if is_param else inner._buffers).get(last) for inner, last, is_param in owners
            ]
            if tensors[0] is None or any(x is not tensors[0] for x in tensors):
                raise WeightsError.rebuilt(self.name)
            held[name] = tensors[0]
        if len({id(x) for x in held.values()}) < len(held):
            raise WeightsError.rebuilt(self.name)
        self._held = held

    def signature(self) -> inspect.Signature | None:
        """Return that of `forward`."""
        return inspect.signature(self.module.forward)

    def draws(self, training: bool) -> bool | None:
        """Return what the calls so far have shown."""
        return self._drawn.get(training)

    def draws_unseen(self, training: bool) -> bool:
        """Return whether a call has drawn: without a seed, from torch's own generators."""
        return bool(self._drawn.get(training))

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the module with other tensors in the places of its own."""
        # The caller may have cut integers, and a weight that is frozen in its hands is not written to.
        kept = {name: x.detach() for name, x in _weights.state.items()}
        state = {slot.name: _own(kept[slot.name], slot.holder.dtype) for slot in self.slots if slot.is_state}
        given = {**_weights.params, **kept, **state}
        with self._borrowed() as (module, modules, places):
            again = partial(self._again, modules, places, given, _training)
            with (
                self._placed(modules, places, given, _training) as after,
                noticing(again),
                self._seeded(_weights.seed, _training),
                _autocast(_weights.compute),
            ):
                out = module(*args, **kwargs)
        changed = (
            state if _training else {n: x for n, x in state.items() if _is_changed(after[n], x, _weights.state[n])}
        )
        return out, {name: after[name].detach() for name in changed}

    @contextlib.contextmanager
    def _placed(
        self, modules: Sequence[torch.nn.Module], places: Places, given: Mapping[str, Any], training: bool
    ) -> Iterator[dict[str, Any]]:
        """Put tensors into a module and set its modes; afterwards, what there is then is in the dict."""
        after: dict[str, Any] = {}
        before = [inner.training for inner in modules]
        wanted = self._modes[training]
        lists = [_listed(inner) for inner in modules if isinstance(inner, torch.nn.RNNBase)]
        held = _found(places)

        def restore() -> None:
            if before != wanted:
                _set_mode(modules, before)
            _put(places, held)
            for attributes, listed in lists:
                attributes.update(listed)

        try:
            _put(places, given)
            if before != wanted:
                _set_mode(modules, wanted)
            yield after
        finally:
            try:
                after.update(_found(places))
                restore()
            except BaseException:  # an interrupt in the midst of it
                restore()
                raise

    def _again(
        self,
        modules: Sequence[torch.nn.Module],
        places: Places,
        given: Mapping[str, Tensor],
        training: bool,
        fn: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute a part of the module again, in the backward of a call, with the weights of that call.

        What it changes of the state is dropped: the call itself has changed it.
        """
        own = places is self._places
        if own and self._thread == threading.get_ident():  # in the call itself
            return fn(*args, **kwargs)
        if own and not self._using.acquire(timeout=_PATIENCE):
            raise RuntimeError(f"`{self.name}` has been in use by another call for {_PATIENCE} s.")
        try:
            state = {slot.name: given[slot.name].clone() for slot in self.slots if slot.is_state}
            with self._placed(modules, places, {**given, **state}, training):
                return fn(*args, **kwargs)
        finally:
            if own:
                self._using.release()

    def _adopt(self, structure: list[Structure]) -> None:
        """Warn of buffers that the module has made, for instance in a call; refuse other changes.

        Raises:
            WeightsError: there are other submodules or parameters.
        """
        if [found[:2] for found in structure] != [known[:2] for known in self._structure]:
            raise WeightsError.rebuilt(self.name)
        self._structure = structure
        known = {(id(inner), last) for _, owners in self._places for inner, last, _ in owners}
        names = [
            f"{path}.{last}".lstrip(".")
            for (path, inner), (_, _, buffers) in zip(self.module.named_modules(), structure, strict=True)
            for last in buffers
            if (id(inner), last) not in known
        ]
        if names:
            warn(DetachedStateWarning.made(self.name, names))

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module], Places]]:
        """Give the module itself, or if another call computes with it a copy that shares its tensors."""
        if self._using.acquire(blocking=False):
            try:
                self._look()
                self._thread = threading.get_ident()
                yield self.module, self._modules, self._places
            finally:
                self._thread = None
                self._using.release()
        else:
            twins: dict[int, torch.nn.Module] = {}
            module = _twin(self.module, twins)
            places = [
                (name, [(twins[id(inner)], last, is_param) for inner, last, is_param in owners])
                for name, owners in self._places
            ]
            yield module, [twins[id(inner)] for inner in self._modules], places

    @contextlib.contextmanager
    def _seeded(self, seed: Tensor | None, training: bool) -> Iterator[None]:
        """Draw random numbers that follow from a seed, and leave torch's own generators as they were.

        Without a seed they are torch's own. In both cases see whether any are drawn.
        """
        if fake_mode() is not None:
            with _Watching() as watching:
                yield
            self._drawn[training] = self._drawn.get(training, False) or watching.drawn
            return
        generator = torch.default_generator
        if seed is None:
            before = generator.get_state()
            yield
            self._note(training, before)
            return
        number = _mixed(*seed.tolist())
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with _alone(), torch.random.fork_rng(devices) if devices else contextlib.nullcontext():
            if devices:
                torch.cuda.manual_seed_all(number)
            before = generator.get_state()
            try:
                generator.manual_seed(number)
                started = generator.get_state()
                yield
                self._note(training, started)
            finally:
                generator.set_state(before)

    def _note(self, training: bool, before: Tensor) -> None:
        if not self._drawn.get(training):
            self._drawn[training] = not torch.equal(torch.default_generator.get_state(), before)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep other threads from drawing: torch has one generator for all of them.

    A module may wait for a graph of another framework whose threads wait for this one. So nobody waits forever, and
    then draws what comes: numbers that do not follow from the seed are better than a hang.
    """
    acquired = _drawing.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if acquired:
            _drawing.release()


_drawing = threading.RLock()


_PATIENCE = 20.0  # seconds


def _mixed(high: int, low: int) -> int:
    """Return 64 bits of which each depends on all of the seed's: torch's generator on the CPU reads only the low half.

    This is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = (high << 32 | low) + 0x9E3779B97F4A7C15 & _BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _BITS
    return mixed ^ mixed >> 31


_BITS = 2**64 - 1


class _Watching(TorchDispatchMode):
    """Sees whether operations on placeholders would draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.drawn = self.drawn or (torch.Tag.nondeterministic_seeded in func.tags and _is_random(func, args, kwargs))
        return func(*args, **kwargs)


def _is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that torch marks as random is; attention is marked for the dropout in it."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


Places = list[tuple[str, list[tuple[torch.nn.Module, str, bool]]]]
"""For each parameter and buffer the modules that have it, as what, and whether as a parameter."""


def _places(module: torch.nn.Module) -> Places:
    names: dict[int, str] = {}
    found: dict[str, list[tuple[torch.nn.Module, str, bool]]] = {}
    for is_param, named in ((True, module.named_parameters()), (False, module.named_buffers())):
        names |= {id(x): name for name, x in named}
        for inner in module.modules():
            for last, x in (inner._parameters if is_param else inner._buffers).items():
                if x is not None:
                    found.setdefault(names[id(x)], []).append((inner, last, is_param))
    return list(found.items())


Structure = tuple[list[torch.nn.Module | None], list[str], list[str]]
"""The submodules of a module, and the names of its parameters and its buffers."""


def _structure(module: torch.nn.Module) -> Structure:
    held = module._parameters, module._buffers
    params, buffers = ([name for name, x in tensors.items() if x is not None] for tensors in held)
    return list(module._modules.values()), params, buffers


def _twin(module: torch.nn.Module, twins: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a module with the same attributes and places of its own for tensors and submodules.

    Not by `copy.deepcopy`, which would copy the tensors that another call has put there.

    Args:
        module: what another call computes with.
        twins: those that are made already, by the id of the original.
    """
    twin = twins.get(id(module))
    if twin is None:
        twin = twins[id(module)] = object.__new__(type(module))
        inner = {name: None if x is None else _twin(x, twins) for name, x in module._modules.items()}
        own = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers), "_modules": inner}
        twin.__dict__.update({**module.__dict__, **own})
    return twin


def _found(places: Places) -> dict[str, Any]:
    """Return the tensors that are in a module.

    As the public `torch.func.functional_call` does, which finds each by its name at every call, for longer than a small
    module computes (45 us of 75 for four layers). Private: `_parameters` and `_buffers` (torch 2.13).
    """
    found = {}
    for name, owners in places:
        for inner, last, is_param in owners:
            found[name] = (inner._parameters if is_param else inner._buffers)[last]
    return found


def _put(places: Places, given: Mapping[str, Any]) -> None:
    """Put tensors into a module."""
    for name, owners in places:
        tensor = given[name]
        for inner, last, is_param in owners:
            (inner._parameters if is_param else inner._buffers)[last] = tensor


def _is_changed(after: Tensor, lent: Tensor, before: Tensor) -> bool:
    """Whether a call has changed a buffer that it was lent a copy of; batch normalisation does not count its writes."""
    if after is not lent or lent._version:
        return True
    return lent.is_floating_point() and fake_mode() is None and not same(lent, before)


def _listed(rnn: torch.nn.RNNBase) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of a recurrent module, and those of them that its call will make of the weights it has."""
    attributes = rnn.__dict__
    return attributes, {name: attributes[name] for name in ("_flat_weights", "_flat_weight_refs")}


def _set_mode(modules: Sequence[torch.nn.Module], modes: Sequence[bool]) -> None:
    for inner, mode in zip(modules, modes, strict=True):
        inner.__dict__["training"] = mode  # an attribute like any other, without the search of `nn.Module`'s


def _own(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a buffer for a call to write to; integers in their own dtype, which a caller may have cut."""
    return buffer.clone() if buffer.is_floating_point() or buffer.is_complex() else buffer.to(dtype, copy=True)


@contextlib.contextmanager
def _autocast(dtype: str | None) -> Iterator[None]:
    """Compute in a narrower dtype what torch holds to be safe in it, and the rest in float32."""
    if dtype is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",):
            stack.enter_context(torch.autocast(kind, torch_dtype(dtype)))
        yield
