"""`tf.Module`s and loaded SavedModels as pure functions, and the modules of others as `tf.Module`s."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private
from polybridge.core.backend import Backend
from polybridge.core.modules import Bridge, Functional, ModuleLibrary, Slot, Weights

Tensor = Any


class TensorFlowModules(ModuleLibrary):
    """`tf.Module` and what `tf.saved_model.load` returns: callables whose variables TensorFlow tracks."""

    name = "tensorflow"

    def functional(self, value: Any) -> Functional | None:
        """Return a module as a function."""
        is_module = isinstance(value, tf.__internal__.tracking.AutoTrackable) and callable(value)
        return TensorFlowFunctional(value, self.backend) if is_module else None

    def native(self, bridge: Bridge, **options: Any) -> BridgedModule:
        """Return a `tf.Module`; `name=` is its own."""
        return BridgedModule(bridge, self, **options)


class TensorFlowFunctional(Functional):
    """A module that reads variables, as a function of their values.

    TensorFlow has no way to call a module with other values. So the variables are assigned these for the time of the
    call, which moves no bytes, and tapes are told that they come from them.
    """

    def __init__(self, module: Any, backend: Backend) -> None:
        """Name the variables."""
        self.backend, self.module, self.name = backend, module, type(module).__name__
        self.slots = [
            Slot(name, variable, not variable.trainable, variable.trainable)
            for name, variable in _variables(module).items()
        ]
        self._takes_training = _takes(module, "training")
        self._using = threading.RLock()

    def read(self, slot: Slot) -> Tensor:
        """Return the value of a variable."""
        return tf.raw_ops.ReadVariableOp(resource=slot.holder.handle, dtype=slot.holder.dtype)

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Assign to the variables."""
        for slot in self.slots:
            if slot.name in values:
                slot.holder.assign(values[slot.name])
        return self.module

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the module while its variables have other values."""
        if self._takes_training:
            kwargs.setdefault("training", _training)
        values = {**_weights.params, **{name: tf.stop_gradient(x) for name, x in _weights.state.items()}}
        with self._using:
            for slot in self.slots:
                _private.record([slot.holder.handle], [values[slot.name]], lambda ct: [ct])
            before = {slot.name: self.read(slot) for slot in self.slots}
            try:
                self._assign(values)
                out = self.module(*args, **kwargs)
                return out, {slot.name: self.read(slot) for slot in self.slots if slot.is_state}
            finally:
                self._assign(before)

    def _assign(self, values: Mapping[str, Tensor]) -> None:
        for slot in self.slots:
            tf.raw_ops.AssignVariableOp(resource=slot.holder.handle, value=values[slot.name])


class BridgedModule(tf.Module):
    """A module of another framework: its weights and state are variables, under the source's names.

    `training=` says how it computes, and random numbers follow from the seed of `tf.random`, from which nothing is
    drawn for a module that draws none. A lazy module has its variables after its first call, as natively.

    Attributes:
        params: a `tf.Variable` for each weight, by name; one that is frozen in the source is not trainable.
        state: a `tf.Variable` for each statistic, counter or other buffer, by name.
    """

    params: dict[str, tf.Variable]
    state: dict[str, tf.Variable]

    def __init__(self, bridge: Bridge, library: ModuleLibrary, name: str | None = None) -> None:
        """Make a variable of each slot."""
        super().__init__(name=name or _valid(bridge.name))
        self._bridge, self._library, self._made = bridge, library, False
        if bridge.built:
            self._make()

    def _make(self) -> None:
        bridge, shared = self._bridge, self._library.shared
        with tf.init_scope(), self.name_scope:  # `tf.function` may be tracing the first call
            made = {slot.name: shared.get(slot, partial(_variable, bridge, slot)) for slot in bridge.slots}
        self.params = {slot.name: made[slot.name] for slot in bridge.slots if not slot.is_state}
        self.state = {slot.name: made[slot.name] for slot in bridge.slots if slot.is_state}
        self._made = True

    def __call__(self, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        """Call the source's module with these variables, and assign what it changes of the state."""
        if not self._made:
            self._bridge.build(args, kwargs)
            self._make()
        params, state = (
            {name: tf.convert_to_tensor(v) for name, v in held.items()} for held in (self.params, self.state)
        )
        sparing = tf.executing_eagerly()  # a seed comes from the generator of all; what is traced cannot be asked
        out, changed = self._bridge.seeded(_drawn, Weights(params, state, None), training, args, kwargs, sparing)
        self._bridge.refuse_recomputation(training, "recompute_grad.<locals>")  # private: TensorFlow's (2.21)
        for name, value in changed.items():
            self.state[name].assign(value)
        return out

    def sync_to_source(self) -> Any:
        """Store these variables' values in the source's module, bit for bit, and return it."""
        return self._bridge.send({name: v.read_value() for name, v in {**self.params, **self.state}.items()})

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        for slot in self._bridge.slots:
            {**self.params, **self.state}[slot.name].assign(self._bridge.fetch(slot))


def _variable(bridge: Bridge, slot: Slot) -> tf.Variable:
    """Return a variable; in a distribution strategy every device has its own state, and that of the first is saved.

    So do Keras's layers and torch's DistributedDataParallel. A mean would be wrong for a counter or a unit vector, and
    reading it would wait for all workers.
    """
    name, sync, aggregation = slot.name.replace(".", "/"), tf.VariableSynchronization, tf.VariableAggregation
    options = {"synchronization": sync.ON_READ, "aggregation": aggregation.ONLY_FIRST_REPLICA} if slot.is_state else {}
    return tf.Variable(bridge.fetch(slot), trainable=slot.trainable, name=name, **options)


def _drawn() -> Tensor:
    return tf.bitcast(tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32), tf.uint32)


def _variables(module: Any) -> dict[str, tf.Variable]:
    """Return the variables that a module tracks, each once, by where they are."""
    found: dict[str, tf.Variable] = {}
    seen: set[int] = set()
    pending = [("", module)]
    view = tf.train.TrackableView(module)
    while pending:
        path, owner = pending.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, tf.Variable):
            found[path] = owner
            continue
        for name, child in view.children(owner).items():
            pending.append((f"{path}.{name}".lstrip("."), child))
    return found


def _takes(module: Any, name: str) -> bool:
    """Whether a module's call has an argument of that name."""
    call = module.__call__
    try:
        return name in inspect.signature(getattr(call, "python_function", call)).parameters
    except ValueError:
        return False


def _valid(name: str) -> str:
    return name if name.isidentifier() else "bridged"
