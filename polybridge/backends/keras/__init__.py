"""The plugin of Keras's layers, whose tensors are TensorFlow's; imports Keras only when they are asked for."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer Keras."""
    return [
        ModulePlugin(
            "keras", _load, module="keras", backend="tensorflow", requirement="keras>=3.15 tensorflow-cpu>=2.21,<2.22"
        )
    ]


def _load(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.keras.modules import KerasModules

    return KerasModules(backend)
