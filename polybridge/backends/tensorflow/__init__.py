"""The plugin of the TensorFlow backend; imports TensorFlow only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer TensorFlow."""
    return [
        BackendPlugin(
            "tensorflow", _load, module="tensorflow", aliases=("tf",), requirement="tensorflow-cpu>=2.21,<2.22"
        )
    ]


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer its modules."""
    return [
        ModulePlugin(
            "tensorflow",
            _load_modules,
            module="tensorflow",
            backend="tensorflow",
            aliases=("tf",),
            requirement="tensorflow-cpu>=2.21,<2.22",
        )
    ]


def _load() -> Backend:
    from polybridge.backends.tensorflow.backend import TensorFlowBackend
    from polybridge.backends.tensorflow.trees import register

    register()
    return TensorFlowBackend()


def _load_modules(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.tensorflow.modules import TensorFlowModules

    return TensorFlowModules(backend)
