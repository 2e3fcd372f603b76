"""A module of another framework as a Keras layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving.serialization_lib import in_safe_mode  # private: no public name tells (3.15)

from polybridge.backends.keras.functional import _snake
from polybridge.backends.tensorflow import _private
from polybridge.core.bridge import Bridge
from polybridge.core.errors import FactoryError, note_randomness
from polybridge.core.functional import Slot, Weights
from polybridge.core.modules import ModuleLibrary
from polybridge.core.specs import TensorSpec
from polybridge.core.trees import flatten, unflatten
from polybridge.core.wrapping import cooked

Tensor = Any


@keras.saving.register_keras_serializable("polybridge")
class BridgedLayer(keras.layers.Layer):
    """A module of another framework: its weights and state are the layer's, under the source's names.

    It is called as the source is, `training=` says how it computes, and random numbers follow from Keras's seed. A lazy
    module is built when it sees its first arguments, as Keras's own layers. XLA cannot compile it, and Keras knows. One
    that is not trainable computes as in evaluation, as Keras's own batch normalisation does, so that its state stays.

    Variables have the source's dtypes. Inputs and outputs follow the layer's policy, which is Keras's own, or one of
    the weights' dtype if that is another than float32. Where the policy computes in less than float32, a source that
    has a mode for it (torch: autocast) gets the float32 weights; any other gets them in the policy's dtype, as Keras's
    own layers do. State keeps its dtype.

    Attributes:
        params: a variable for each weight, by name; one that is frozen in the source is not trainable.
        state: a variable for each statistic, counter or other buffer, by name.
    """

    params: dict[str, keras.Variable]
    state: dict[str, keras.Variable]

    def __init__(self, bridge: Bridge, library: ModuleLibrary, **options: Any) -> None:
        """Make a variable of each slot.

        Args:
            bridge: the source's module.
            library: that this becomes a module of.
            **options: of every layer: `name`, `dtype`, `trainable`, `activity_regularizer`.
        """
        object.__setattr__(self, "call", _called_as(bridge, self._compute))  # of which Keras reads the signature
        options["name"] = options.get("name") or _named(bridge)
        super().__init__(**options)
        self.supports_jit = False
        self._bridge, self._library = bridge, library
        self._chosen = options.get("dtype") is not None
        self._arguments: Any = None
        # Another one for evaluation: what it draws must not change how training goes on.
        self.seed_generators = [keras.random.SeedGenerator() for _ in range(2)] if bridge.random else []
        if bridge.built:
            self._make()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the layer if it is lazy, and call it."""
        if not self.built:
            given = {name: x for name, x in kwargs.items() if name != "training"}
            self._build_for(keras.tree.map_structure(self._spec, [list(args), given]))
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:  # Keras's own where it cannot convert an argument, or its copy of the source's
            note_randomness(error)
            raise

    def build(self, input_shape: Any) -> None:
        """Make the variables of a lazy module for one input of this shape, and of the policy's dtype."""
        if not self.built:
            self._build_for([[TensorSpec(tuple(input_shape), self.compute_dtype)], {}])

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a call gives, by tracing it: its dtypes, too, are the source's."""
        return keras.Operation.compute_output_spec(self, *args, **kwargs)

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        """Return the shape of the result for inputs of these shapes and the policy's dtype.

        Args:
            *shapes: of the inputs.
            **named: as `mask_shape=` for the argument `mask`.
        """
        inputs = [keras.KerasTensor(shape, self.compute_dtype) for shape in shapes]
        given = {n.removesuffix("_shape"): keras.KerasTensor(s, self.compute_dtype) for n, s in named.items()}
        return keras.tree.map_structure(lambda x: x.shape, self.compute_output_spec(*inputs, **given))

    def get_build_config(self) -> dict[str, Any]:
        """Return what a lazy module was built for."""
        return {"arguments": self._arguments}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build a lazy module again."""
        if not self.built and config.get("arguments") is not None:
            self._build_for(_read(config["arguments"]))

    def get_config(self) -> dict[str, Any]:
        """Return how to make the layer again, without its weights.

        Raises:
            FactoryError: `polybridge.wrap` was given no `factory=`, or one that has no name.
        """
        reason = f"Keras writes layers of its own, and no module of {self._bridge.functional.backend.name}"
        return {**super().get_config(), "recipe": self._bridge.recipe(reason)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BridgedLayer:
        """Make the layer again.

        Raises:
            FactoryError: the factory cannot be found; or Keras loads a file in its safe mode, and would import it.
        """
        options = dict(config)
        recipe = options.pop("recipe")
        if in_safe_mode() and "import" in recipe["factory"]:
            raise FactoryError.unsafe(recipe["factory"]["import"])
        layer: BridgedLayer = cooked(recipe, "keras", **options)
        return layer

    def sync_to_source(self) -> Any:
        """Store these variables' values in the source's module, bit for bit, and return it."""
        held = {**self.params, **self.state}
        return self._bridge.send({name: tf.convert_to_tensor(v.value) for name, v in held.items()})

    def sync_from_source(self) -> None:
        """Take the values of the source's module."""
        for slot in self._bridge.slots:
            {**self.params, **self.state}[slot.name].assign(self._bridge.fetch(slot))

    def _build_for(self, arguments: Any) -> None:
        self._bridge.build(*arguments)
        self._arguments = _written(arguments)
        self._make()

    def _make(self) -> None:
        bridge = self._bridge
        if not self._chosen and (dtype := _dtype(bridge)) is not None:
            self.dtype_policy = keras.DTypePolicy(dtype)
        with keras.name_scope(self.name):
            made = {s.name: self._library.shared.get(s, partial(_variable, bridge, s)) for s in bridge.slots}
        self.params = {slot.name: made[slot.name] for slot in bridge.slots if not slot.is_state}
        self.state = {slot.name: made[slot.name] for slot in bridge.slots if slot.is_state}
        frozen = [made[slot.name] for slot in bridge.slots if not (slot.is_state or slot.trainable)]
        object.__setattr__(self, "_frozen", frozen)  # in the source; nothing that Keras has to find once more
        for name, variable in made.items():  # `tf.train.Checkpoint` finds attributes, and nothing in Keras's dicts
            setattr(self, f"variable:{name}", variable)
        self.built = True

    def _spec(self, x: Any) -> Any:
        """Return what a tensor argument is when `call` gets it."""
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            return x
        dtype = keras.backend.standardize_dtype(x.dtype)
        return TensorSpec(tuple(x.shape), self.compute_dtype if keras.backend.is_float_dtype(dtype) else dtype)

    @tf.autograph.experimental.do_not_convert
    def _compute(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """Call the source's module with these variables, and assign what it changes of the state."""
        for variable in self._frozen:
            if variable.trainable and isinstance(value := variable.value, tf.Variable) and not value.trainable:
                _private.let_follow(value)
        params, state = ({name: tf.convert_to_tensor(v.value) for name, v in h.items()} for h in self._held())
        mixed = self.compute_dtype in _NARROW
        weights = Weights(params, state, None)
        if mixed and self._bridge.functional.autocasts:
            weights = weights._replace(compute=self.compute_dtype)
        elif mixed:
            weights = weights._replace(params={name: self._narrowed(x) for name, x in params.items()})
        training = (
            bool(training) and self.trainable
        )  # so that a frozen layer's state stays, as in Keras's normalisation
        draw = partial(self._drawn, training)
        out, changed, losses = self._bridge.seeded(draw, weights, training, args, kwargs, sparing=False)
        self._bridge.refuse_recomputation(training, "recompute_grad.<locals>")  # private: TensorFlow's (2.21)
        for name, value in changed.items():
            (self.state[name] if name in self.state else self.params[name]).assign(value)
        for loss in losses:
            self.add_loss(loss)
        if mixed:
            leaves, treedef = flatten(out)
            out = unflatten(treedef, [self._narrowed(x) if tf.is_tensor(x) else x for x in leaves])
        return out

    def _held(self) -> tuple[dict[str, keras.Variable], dict[str, keras.Variable]]:
        return self.params, self.state

    def _narrowed(self, x: Tensor) -> Tensor:
        return tf.cast(x, self.compute_dtype) if x.dtype == tf.float32 else x

    def _drawn(self, training: bool) -> Tensor:
        return tf.cast(self.seed_generators[not training].next(), tf.uint32)


_NARROW = ("float16", "bfloat16")


def _called_as(bridge: Bridge, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` with the signature of the source and `training=`: Keras tells arguments apart by their names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs)

    training = inspect.Parameter("training", inspect.Parameter.KEYWORD_ONLY, default=None)
    taken = bridge.functional.signature()
    parameters = list(_ANYTHING if taken is None else taken.parameters.values())
    if not any(p.name == "training" for p in parameters):
        place = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        parameters.insert(place, training)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _named(bridge: Bridge) -> str:
    """Return a layer's name after the class of the source, numbered as Keras numbers its own."""
    name = _snake(bridge.name) or "bridged_layer"
    number = keras.backend.get_uid(name) - 1
    return f"{name}_{number}" if number else name


def _dtype(bridge: Bridge) -> str | None:
    """Return the dtype of all weights where Keras's policy would be another; None where it decides."""
    dtypes = {bridge.dtype(slot) for slot in bridge.slots if not slot.is_state}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    return dtype if dtype != "float32" and keras.backend.is_float_dtype(dtype) else None


def _variable(bridge: Bridge, slot: Slot) -> keras.Variable:
    value = bridge.fetch(slot)
    return keras.Variable(
        lambda *_, **__: value,  # not yet in a scope in which Keras allows no variables, such as a model's first call
        shape=tuple(value.shape),
        trainable=slot.trainable,
        dtype=value.dtype.name,
        name=slot.name.replace("/", "_"),
        autocast=False,
    )


def _written(arguments: Any) -> Any:
    """Return arguments as JSON can hold them, a `TensorSpec` as a pair under a name of its own."""
    leaves, treedef = flatten(arguments, lambda x: isinstance(x, TensorSpec))
    found = [{_SPEC: [x.shape, x.dtype]} if isinstance(x, TensorSpec) else x for x in leaves]
    return unflatten(treedef, found)


def _read(written: Any) -> Any:
    if isinstance(written, dict):
        if _SPEC in written:
            shape, dtype = written[_SPEC]
            return TensorSpec(tuple(shape), dtype)
        return {name: _read(x) for name, x in written.items()}
    return list(map(_read, written)) if isinstance(written, (list, tuple)) else written


_SPEC = "tensor"


_ANYTHING = [
    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
]
