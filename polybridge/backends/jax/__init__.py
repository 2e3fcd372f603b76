"""The plugin of the JAX backend; imports JAX only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer JAX."""
    return [BackendPlugin("jax", _load, module="jax", requirement="jax>=0.10,<0.11")]


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer its modules."""
    return [ModulePlugin("jax", _load_modules, module="jax", backend="jax", requirement="jax>=0.10,<0.11")]


def _load() -> Backend:
    from polybridge.backends.jax.backend import JaxBackend

    return JaxBackend()


def _load_modules(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.jax.modules import JaxModules

    return JaxModules(backend)
