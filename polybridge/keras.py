"""The layer that bridged modules are in Keras. Import it before `keras.models.load_model` reads a file that has one."""

from __future__ import annotations

from typing import Any

from polybridge.core.registry import registry

_library: Any = registry.library("keras")

BridgedLayer: Any = _library.layer
