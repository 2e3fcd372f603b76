"""The plugin of Equinox's modules, whose tensors are JAX's; imports Equinox only when they are asked for."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer Equinox."""
    return [
        ModulePlugin(
            "equinox",
            _load,
            module="equinox",
            backend="jax",
            aliases=("eqx",),
            requirement="equinox>=0.13 jax>=0.10,<0.11",
        )
    ]


def _load(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.equinox.modules import EquinoxModules

    return EquinoxModules(backend)
