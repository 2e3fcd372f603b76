"""The plugin of Flax NNX's modules, whose tensors are JAX's; imports Flax only when they are asked for."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer Flax NNX."""
    return [
        ModulePlugin(
            "flax", _load, module="flax", backend="jax", aliases=("nnx",), requirement="flax>=0.12 jax>=0.10,<0.11"
        )
    ]


def _load(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.flax.modules import FlaxModules

    return FlaxModules(backend)
