"""The plugin of the torch backend; imports torch only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, hookimpl


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer torch."""
    return [BackendPlugin("torch", _load, module="torch", aliases=("pytorch",), requirement="torch")]


def _load() -> Backend:
    from polybridge.backends.torch.backend import TorchBackend

    return TorchBackend()
