"""The plugin of the NumPy backend. NumPy is polybridge's carrier too, so it is always installed."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, hookimpl


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer NumPy."""
    return [BackendPlugin("numpy", _load, module="numpy", aliases=("np",), requirement="numpy>=2")]


def _load() -> Backend:
    from polybridge.backends.numpy.backend import NumPyBackend

    return NumPyBackend()
