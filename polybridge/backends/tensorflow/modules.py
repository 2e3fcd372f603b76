"""`tf.Module`s and loaded SavedModels as pure functions, and the modules of others as `tf.Module`s."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow.bridged import BridgedModule
from polybridge.backends.tensorflow.functional import TensorFlowFunctional
from polybridge.core.bridge import Bridge
from polybridge.core.errors import NotCallableError
from polybridge.core.functional import Functional
from polybridge.core.modules import ModuleLibrary


class TensorFlowModules(ModuleLibrary):
    """`tf.Module` and what `tf.saved_model.load` returns: callables whose variables TensorFlow tracks."""

    name = "tensorflow"
    classes = (tf.Module,)
    builds = True

    def functional(self, value: Any) -> Functional | None:
        """Return a module as a function.

        Raises:
            NotCallableError: a SavedModel without a function that could be meant.
        """
        if not isinstance(value, tf.__internal__.tracking.AutoTrackable):
            return None
        if callable(value):
            return TensorFlowFunctional(value, self.backend)
        if not hasattr(value, "signatures"):
            return None
        endpoints = _endpoints(value)
        if len(endpoints) != 1:
            raise NotCallableError.saved_model(endpoints, value.signatures)
        return TensorFlowFunctional(value, self.backend, *endpoints)

    def native(self, bridge: Bridge, name: str | None = None) -> BridgedModule:
        """Return a `tf.Module`; `name=` is its own."""
        return BridgedModule(bridge, self, name)


def _endpoints(saved: Any) -> list[str]:
    """Return the names of a SavedModel's functions, without those that every file of Keras has."""
    functions = [name for name, child in vars(saved).items() if hasattr(child, "concrete_functions")]
    return [name for name in functions if not name.startswith("_") and name != "__call__"]
