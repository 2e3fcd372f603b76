"""Keras's layers and models as pure functions, and the modules of others as layers."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from polybridge.core.backend import Backend
from polybridge.core.modules import Bridge, Functional, ModuleLibrary, Slot, Weights

Tensor = Any


class KerasModules(ModuleLibrary):
    """`keras.layers` and `keras.Model`."""

    name = "keras"

    def functional(self, value: Any) -> Functional | None:
        """Return a layer or model as a function."""
        return KerasFunctional(value, self.backend) if isinstance(value, keras.layers.Layer) else None

    def native(self, bridge: Bridge) -> BridgedLayer:
        """Return a layer."""
        return BridgedLayer(bridge, self)


class KerasFunctional(Functional):
    """A layer or model as a function of its variables."""

    def __init__(self, layer: keras.layers.Layer, backend: Backend) -> None:
        """Name the variables."""
        self.backend, self.module, self.name = backend, layer, type(layer).__name__
        layers = layer._flatten_layers()  # private: Keras lists variables, not to which list they belong (3.15)
        weights = {id(v) for inner in layers for v in inner._trainable_variables}
        self.slots = [Slot(name, v, id(v) not in weights, v.trainable) for name, v in _names(layer).items()]
        self._seeds = {id(g.state): i for i, g in enumerate(_seed_generators(layer))}
        self.random = bool(self._seeds)
        self._takes_training = "training" in inspect.signature(layer.call).parameters
        self.built = all(inner.built for inner in layers)

    def read(self, slot: Slot) -> Tensor:
        """Return the value of a variable."""
        return tf.convert_to_tensor(slot.holder.value)

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Assign to the variables."""
        for slot in self.slots:
            if slot.name in values:
                slot.holder.assign(values[slot.name])
        return self.module

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the layer in a scope in which its variables have other values."""
        if self._takes_training:
            kwargs.setdefault("training", _training)
        given = {}
        for slot in self.slots:
            value = _weights.params.get(slot.name)
            if value is None:
                value = tf.stop_gradient(_weights.state[slot.name])
                number = self._seeds.get(id(slot.holder))
                if number is not None and _weights.seed is not None:
                    value = _seed(_weights.seed, number)
            given[slot.name] = value
        with keras.StatelessScope([(slot.holder, given[slot.name]) for slot in self.slots]) as scope:
            before = {slot.name: scope.get_current_value(slot.holder) for slot in self.slots}
            out = self.module(*args, **kwargs)
        changed = {}
        for slot in self.slots:
            value = scope.get_current_value(slot.holder)
            if value is not before[slot.name]:
                changed[slot.name] = value
        return out, changed


class BridgedLayer(keras.layers.Layer):
    """A module of another framework: its weights and state are the layer's, under the source's names.

    `training=` says how it computes, and random numbers follow from Keras's seed. One that is not trainable computes
    as in evaluation, as Keras's own batch normalisation does, so that its state stays as it is.
    """

    def __init__(self, bridge: Bridge, library: ModuleLibrary, **kwargs: Any) -> None:
        """Make a variable of each slot."""
        super().__init__(**kwargs)
        self._bridge = bridge
        made = {slot.name: library.shared.get(slot, partial(_variable, bridge, slot)) for slot in bridge.slots}
        self.params = {slot.name: made[slot.name] for slot in bridge.slots if not slot.is_state}
        self.state = {slot.name: made[slot.name] for slot in bridge.slots if slot.is_state}
        self.seed_generator = keras.random.SeedGenerator() if bridge.random else None
        self.built = True

    def call(self, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        """Call the source's module with these variables, and assign what it changes of the state."""
        seed = None if self.seed_generator is None else tf.cast(self.seed_generator.next(), tf.uint32)
        params, state = (
            {name: tf.convert_to_tensor(v) for name, v in held.items()} for held in (self.params, self.state)
        )
        out, changed = self._bridge(Weights(params, state, seed), bool(training) and self.trainable, args, kwargs)
        for name, value in changed.items():
            self.state[name].assign(value)
        return out

    def sync_to_source(self) -> Any:
        """Store these variables' values in the source's module, bit for bit, and return it."""
        held = {**self.params, **self.state}
        return self._bridge.send({name: tf.convert_to_tensor(v.value) for name, v in held.items()})

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        for slot in self._bridge.slots:
            {**self.params, **self.state}[slot.name].assign(self._bridge.fetch(slot))


def _variable(bridge: Bridge, slot: Slot) -> keras.Variable:
    value = bridge.fetch(slot)
    name = slot.name.replace("/", "_")
    return keras.Variable(
        value, trainable=slot.trainable, dtype=value.dtype.name, name=name, autocast=not slot.is_state
    )


def _seed(seed: Tensor, number: int) -> Tensor:
    """Return the state of one of several generators that follow from one seed."""
    found = seed + tf.constant([number * 0x9E3779B9 % 2**32, 0], tf.uint32)
    return tf.bitwise.bitwise_and(found, tf.constant(0x3FFFFFFF, tf.uint32))  # a destination may have int32 for it


def _seed_generators(layer: keras.layers.Layer) -> list[Any]:
    return [g for inner in layer._flatten_layers() for g in inner._seed_generators]  # private, as above


def _names(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return the variables of a layer, each once, by path.

    Keras numbers the layers of a process; here those of one parent are numbered, so that a model has the same names
    whenever it is built.
    """
    classes = {inner.name: _snake(type(inner).__name__) for inner in layer._flatten_layers()}
    classes |= {generator.name: "seed_generator" for generator in _seed_generators(layer)}
    numbers: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    found: dict[str, Any] = {}
    own = layer.name + "/"
    for variable in {id(v): v for v in [*layer.variables, *layer.metrics_variables]}.values():
        path: tuple[str, ...] = ()
        for part in variable.path.removeprefix(own).split("/"):
            siblings = numbers[path]
            if part not in siblings:
                stem = classes.get(part, part)
                is_numbered = re.fullmatch(rf"{re.escape(stem)}(_\d+)?", part) is not None
                siblings[part] = _unused(stem if is_numbered else part, siblings.values())
            path = (*path, siblings[part].replace(".", "_"))
        name = _unused(".".join(path), found)
        found[name] = variable
    return found


def _unused(name: str, used: Any) -> str:
    number, candidate = 0, name
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _snake(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
