"""Keras's layers and models as pure functions of their variables."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator  # private: no public name leads to it (3.15)

from polybridge.backends.tensorflow import _private
from polybridge.backends.tensorflow.tracing import Traced
from polybridge.core.backend import Backend
from polybridge.core.bridge import Bridge
from polybridge.core.errors import MutationError, UnbuiltError, UnsupportedTensorError, WeightsError
from polybridge.core.functional import Functional, Slot, Weights
from polybridge.core.specs import dtype
from polybridge.core.threads import PerThread
from polybridge.core.trees import flatten, unflatten

Tensor = Any


class KerasFunctional(Functional):
    """A layer or model as a function of its variables.

    It runs as a graph, as in Keras's own `fit`, unless a model has `run_eagerly`.
    """

    autocasts = True

    def __init__(self, layer: keras.layers.Layer, backend: Backend) -> None:
        """Name the variables that there are."""
        self.backend, self.module, self.name = backend, layer, type(layer).__name__
        taken = inspect.signature(layer.call).parameters
        self._takes_training = "training" in taken
        self._traced = Traced(self._run, self.name)
        self._others: dict[str, KerasFunctional] = {}
        self._draws_from_global = False
        self._index()

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let the layer make its variables by a call with symbols, or where it needs values by a real one."""
        if self._unbuilt():
            if self._takes_training:
                kwargs = {"training": False, **kwargs}
            try:
                self.module(*_symbolic(args), **_symbolic(kwargs))
            except Exception:  # whatever a layer raises that reads values; what is wrong comes again
                self.module(*args, **kwargs)
            self._is_called = True
        self._index()

    def read(self, slot: Slot) -> Tensor:
        """Return the value of a variable."""
        return tf.convert_to_tensor(slot.holder.value)

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Assign to the variables.

        Raises:
            UnsupportedTensorError: a value has a dtype that its variable cannot hold exactly.
            WeightsError: the layer has other layers or weights than it had.
        """
        self._look()
        for slot in self.slots:
            value = values.get(slot.name)
            if value is not None and not np.can_cast(value.dtype.as_numpy_dtype, dtype(slot.holder._dtype)):
                reason = "a variable of Keras keeps its dtype"
                raise UnsupportedTensorError.weight(self.name, slot.name, value.dtype.name, slot.holder._dtype, reason)
        for slot in self.slots:
            if slot.name in values:
                slot.holder.assign(tf.cast(values[slot.name], slot.holder._dtype))
        return self.module

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, ...]:
        """Call the layer in a scope in which its variables have other values.

        Raises:
            UnbuiltError: the layer has not made all of its variables, or draws from Keras's global generator and was
                given no seed.
            UnsupportedTensorError: the layer cannot compute in the weights' dtype.
            WeightsError: the layer has other layers or weights than it had.
        """
        if not self.built:
            raise UnbuiltError.before_call(self.name)
        self._look()
        functional = self._computing_in(_weights)
        if functional._takes_training:
            kwargs.setdefault("training", _training)
        if getattr(functional.module, "run_eagerly", False):
            return functional._run(_weights, args, kwargs)
        kind = tuple(layer.trainable for layer in functional._layers)
        found: tuple[Any, ...] = functional._traced(kind, _weights, args, kwargs)
        return found

    def _index(self) -> None:
        """Find the layers and variables."""
        layer = self.module
        self._layers = layer._flatten_layers()  # private: Keras lists variables, not to which list they belong (3.15)
        weights = {id(v) for inner in self._layers for v in inner._trainable_variables}
        self.slots = [Slot(name, v, id(v) not in weights, v.trainable) for name, v in _names(layer).items()]
        self._seeds = {id(g.state): i for i, g in enumerate(_seed_generators(layer))}
        self.random = bool(self._seeds) or self._draws_from_global
        self._regularized = [slot for slot in self.slots if slot.holder.regularizer is not None]
        self.built = not self._unbuilt()
        self._is_settled = all(inner.built for inner in self._layers)
        self._structure = list(map(_structure, self._layers))

    def _look(self) -> None:
        """Raise a WeightsError if layers or weights have been added or removed; what a first call makes is no such."""
        if self._is_settled and list(map(_structure, self._layers)) != self._structure:
            raise WeightsError.rebuilt(self.name)

    def _unbuilt(self) -> bool:
        return not (self.module.built or getattr(self, "_is_called", False))

    def _run(self, weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        generator = global_seed_generator()
        values = {id(slot.holder): self._value(slot, weights) for slot in self.slots}
        if weights.seed is not None:
            values[id(generator.state)] = _seed(weights.seed, len(self._seeds), generator.state)
        trained = {id(slot.holder) for slot in self.slots if not slot.is_state}
        with _private.keeping(), _mixed(self._layers, weights.compute), _Scope(values, trained) as scope:
            out = self.module(*args, **kwargs)
            losses = [*scope.losses, *self._regularization(weights)]
        if scope.losses:
            for layer in self._layers:
                layer._loss_ids.clear()  # private: identities of what is gone soon, which Keras collects (3.15)
        self._settle(generator, scope, weights, values)
        changed = {}
        for slot in self.slots:
            value = scope.get_current_value(slot.holder)
            if value is not values[id(slot.holder)]:
                changed[slot.name] = value
        return out, changed, losses

    def _value(self, slot: Slot, weights: Weights) -> Tensor:
        value = weights.params.get(slot.name)
        if value is not None:
            return value
        number = self._seeds.get(id(slot.holder))
        if number is not None and weights.seed is not None:
            return _seed(weights.seed, number, slot.holder)
        value = tf.stop_gradient(weights.state[slot.name])
        # A destination may have integers of its own width.
        return value if value.dtype.is_floating else tf.cast(value, slot.holder._dtype)

    def _regularization(self, weights: Weights) -> list[Tensor]:
        return [
            slot.holder.regularizer(weights.params[slot.name])
            for slot in self._regularized
            if slot.holder.trainable and slot.name in weights.params
        ]

    def _settle(
        self, generator: Any, scope: keras.StatelessScope, weights: Weights, values: Mapping[int, Tensor]
    ) -> None:
        """Look for what a first call finds out."""
        if weights.seed is None and scope.get_current_value(generator.state) is not None:
            self._draws_from_global = True  # which stays where it is in the scope: each call would draw the same
            raise UnbuiltError.before_call(self.name)
        lost = scope.state_mapping.keys() - values.keys() - {id(generator.state)}
        if lost and self._is_settled:
            raise MutationError.unlisted(self.name)
        if not self._is_settled:
            self._is_settled = True
            known = {id(slot.holder) for slot in self.slots}
            if any(id(v) not in known for v in _variables(self.module)):
                raise UnbuiltError.before_call(self.name)
            self._structure = list(map(_structure, self._layers))

    def _computing_in(self, weights: Weights) -> KerasFunctional:
        """Return this function, or one of a layer like this whose policy is the dtype that the weights have."""
        given = {name: x for name, x in {**weights.params, **weights.state}.items() if x.dtype.is_floating}
        slots = [slot for slot in self.slots if slot.name in given]
        other = {given[slot.name].dtype.name for slot in slots if given[slot.name].dtype.name != slot.holder._dtype}
        if not other:
            return self
        dtype = min(other)
        functional = self._others.get(dtype)
        if functional is None:
            functional = self._others.setdefault(dtype, self._in_dtype(dtype))
        for mine, slot in zip(self.slots, functional.slots, strict=True):
            if slot.name not in given:
                continue
            found, own = given[slot.name].dtype.name, slot.holder._dtype
            if found != own:
                reason = (
                    f"others of its weights and state are in {own}" if own != mine.holder._dtype else "it is no float"
                )
                raise UnsupportedTensorError.weight(self.name, slot.name, found, mine.holder._dtype, reason)
        return functional

    def _in_dtype(self, dtype: str) -> KerasFunctional:
        """Return the function of a layer of the same configuration with another dtype policy."""
        try:
            config = keras.saving.serialize_keras_object(self.module)
            layer = keras.saving.deserialize_keras_object(_with_policy(config, dtype), safe_mode=False)
            functional = KerasFunctional(layer, self.backend)
            same = [slot.name for slot in functional.slots] == [slot.name for slot in self.slots]
            problem = None if same else "a layer made of its configuration has other variables"
        except Exception as error:  # whatever a class raises that cannot be made of its configuration
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            own = self.slots[0].holder._dtype
            raise UnsupportedTensorError.weight(self.name, self.slots[0].name, dtype, own, problem)
        return functional


@contextlib.contextmanager
def _mixed(layers: Sequence[keras.layers.Layer], compute: str | None) -> Iterator[None]:
    """Let layers whose policy is float32 compute as under a mixed policy, on this thread.

    The layers themselves, and no others made of their configuration, which need not hold all that a user has set.

    Args:
        layers: all of a model's; those of another policy keep it.
        compute: the narrower dtype; None for none.
    """
    if compute is None and _compute.value is None:
        yield
        return
    plain = [layer for layer in layers if layer.dtype_policy in (_PLAIN, _MIXABLE)]
    _Mixable.enter(plain)
    try:
        with _compute.set(compute):
            yield
    except Exception as error:
        if compute is None:
            raise
        error.add_note(
            f"The model was called in torch's autocast, where layers of the dtype policy float32 compute as under "
            f"mixed_{compute}. In `torch.autocast(..., enabled=False)` they compute in float32."
        )
        raise
    finally:
        _Mixable.leave(plain)


_compute: PerThread[str | None] = PerThread(None)


_PLAIN = keras.DTypePolicy("float32")


class _Mixable(keras.DTypePolicy):
    """The policy float32, which on a thread inside of `_mixed` computes in a narrower dtype: other threads go on."""

    _lock = threading.RLock()  # a handler of signals may call models too
    _users: ClassVar[dict[int, int]] = {}  # by the id of a layer

    @property
    def compute_dtype(self) -> str:
        return _compute.value or "float32"

    @classmethod
    def enter(cls, layers: Sequence[keras.layers.Layer]) -> None:
        with cls._lock:
            for layer in layers:
                cls._users[id(layer)] = cls._users.get(id(layer), 0) + 1
                layer.dtype_policy = _MIXABLE

    @classmethod
    def leave(cls, layers: Sequence[keras.layers.Layer]) -> None:
        with cls._lock:
            for layer in layers:
                cls._users[id(layer)] -= 1
                if not cls._users[id(layer)]:
                    del cls._users[id(layer)]
                    layer.dtype_policy = _PLAIN


_MIXABLE = _Mixable("float32")


class _Scope(keras.StatelessScope):
    """A scope in which variables have other values, and derivatives are those that variables have outside of it.

    What a call assigns to a weight, as spectral normalisation does, is a new value of the weight and no function of the
    old one: the cotangents of both are the weight's.

    Args:
        values: by the id of a variable, as they are: Keras's own constructor would cast them.
        trained: the ids of those that are weights.
    """

    def __init__(self, values: Mapping[int, Tensor], trained: Collection[int]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping.update(values)
        self._values, self._trained = values, trained

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        is_weight = id(variable) in self._trained
        value = _assigned(self._values[id(variable)], value) if is_weight else tf.stop_gradient(value)
        super().add_update((variable, value))


@tf.custom_gradient
def _assigned(weight: Tensor, value: Tensor) -> Any:
    return tf.identity(value), lambda ct: (ct, None)


def _symbolic(tree: Any) -> Any:
    """Return the tree with symbols for tensors."""
    leaves, treedef = flatten(tree)
    return unflatten(
        treedef, [keras.KerasTensor(x.shape, x.dtype.name) if isinstance(x, tf.Tensor) else x for x in leaves]
    )


def _with_policy(config: Any, dtype: str) -> Any:
    """Return a serialised layer with another dtype policy everywhere; inputs have a dtype without a policy."""
    if isinstance(config, list):
        return [_with_policy(x, dtype) for x in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") in ("DTypePolicy", "FloatDTypePolicy"):
        return {**config, "config": {**config["config"], "name": dtype}}
    return {k: dtype if k == "dtype" and x in _FLOATS else _with_policy(x, dtype) for k, x in config.items()}


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _seed(seed: Tensor, number: int, state: keras.Variable) -> Tensor:
    """Return the state of one of several generators that follow from one seed."""
    found = seed + tf.constant([number * 0x9E3779B9 % 2**32, 0], tf.uint32)
    found = tf.bitwise.bitwise_and(found, tf.constant(0x3FFFFFFF, tf.uint32))  # a destination may have int32 for it
    return tf.cast(found, state._dtype)


def _seed_generators(layer: keras.layers.Layer) -> list[Any]:
    return [g for inner in layer._flatten_layers() for g in inner._seed_generators]  # private, as above


def _names(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return the variables of a layer, each once, by path.

    Keras numbers the layers of a process; here those of one parent are numbered, so that a model has the same names
    whenever it is built.
    """
    classes = {inner.name: _snake(_class(inner)) for inner in layer._flatten_layers()}
    classes |= {generator.name: "seed_generator" for generator in _seed_generators(layer)}
    numbers: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    found: dict[str, Any] = {}
    own = layer.name + "/"
    for variable in _variables(layer):
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


def _structure(layer: keras.layers.Layer) -> tuple[int, int, int]:
    """Return what changes when a layer or a weight is added or removed, as by `model.add` and `enable_lora`."""
    return len(layer._layers), len(layer._trainable_variables), len(layer._non_trainable_variables)  # private, as above


def _class(layer: keras.layers.Layer) -> str:
    """Return after what a layer is named."""
    bridge = getattr(layer, "_bridge", None)
    return bridge.name if isinstance(bridge, Bridge) else type(layer).__name__


def _variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the variables of a layer, each once: those that Keras lists, and those that layers keep to themselves.

    The states of recurrent layers are of the second kind.
    """
    kept = [x for inner in layer._flatten_layers() for value in vars(inner).values() for x in _flat(value)]
    found = [*layer.variables, *layer.metrics_variables, *(x for x in kept if isinstance(x, keras.Variable))]
    return list({id(v): v for v in found}.values())


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _flat(x)
    else:
        yield value


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
