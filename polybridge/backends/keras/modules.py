"""Keras's layers and models as pure functions, and the modules of others as layers."""

from __future__ import annotations

from typing import Any

import keras

from polybridge.backends.keras.bridged import BridgedLayer
from polybridge.backends.keras.functional import KerasFunctional
from polybridge.core.bridge import Bridge
from polybridge.core.errors import UnsupportedModuleError
from polybridge.core.functional import Functional
from polybridge.core.modules import ModuleLibrary


class KerasModules(ModuleLibrary):
    """`keras.layers` and `keras.Model`."""

    name = "keras"
    classes = (keras.layers.Layer,)
    builds = True

    def functional(self, value: Any) -> Functional | None:
        """Return a layer or model as a function.

        Raises:
            UnsupportedModuleError: Keras does not run on TensorFlow.
        """
        if not isinstance(value, keras.layers.Layer):
            return None
        _check_backend()
        return KerasFunctional(value, self.backend)

    @property
    def layer(self) -> type[BridgedLayer]:
        """The class of the layers; offered to users as `polybridge.keras.BridgedLayer`."""
        return BridgedLayer

    def native(self, bridge: Bridge, **options: Any) -> BridgedLayer:
        """Return a layer, given what every layer takes."""
        _check_backend()
        return BridgedLayer(bridge, self, **options)


def _check_backend() -> None:
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedModuleError.keras_on(keras.backend.backend())
