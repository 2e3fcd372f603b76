"""The plugin of the TensorFlow backend; imports TensorFlow only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, hookimpl


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer TensorFlow."""
    return [BackendPlugin("tensorflow", _load, module="tensorflow", aliases=("tf",), requirement="tensorflow-cpu")]


def _load() -> Backend:
    from polybridge.backends.tensorflow.backend import TensorFlowBackend

    return TensorFlowBackend()
