"""The plugin of the JAX backend; imports JAX only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, hookimpl


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer JAX."""
    return [BackendPlugin("jax", _load, module="jax", requirement="jax")]


def _load() -> Backend:
    from polybridge.backends.jax.backend import JaxBackend

    return JaxBackend()
