"""A module of another framework as a `tf.Module`."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from polybridge.core.bridge import Bridge
from polybridge.core.functional import Slot, Weights
from polybridge.core.modules import ModuleLibrary

Tensor = Any


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

    def __repr__(self) -> str:
        """Say what it bridges."""
        return f"BridgedModule({self._bridge.name}, src={self._bridge.functional.backend.name!r})"

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
        weights = Weights(params, state, None)
        ran = self._bridge.seeded(_drawn, weights, training, args, kwargs, sparing)
        out, changed = self._bridge.without_losses(ran, weights)
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


def _valid(name: str) -> str:
    return name if name.isidentifier() else "bridged"
