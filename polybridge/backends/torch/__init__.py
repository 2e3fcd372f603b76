"""The plugin of the torch backend; imports torch only when the backend is loaded."""

from polybridge.core.backend import Backend
from polybridge.core.hookspecs import BackendPlugin, ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary


@hookimpl
def polybridge_backends() -> list[BackendPlugin]:
    """Offer torch."""
    return [BackendPlugin("torch", _load, module="torch", aliases=("pytorch",), requirement="torch>=2.13,<2.14")]


@hookimpl
def polybridge_modules() -> list[ModulePlugin]:
    """Offer its modules."""
    return [
        ModulePlugin(
            "torch",
            _load_modules,
            module="torch",
            backend="torch",
            aliases=("pytorch",),
            requirement="torch>=2.13,<2.14",
        )
    ]


def _load() -> Backend:
    from polybridge.backends.torch.backend import TorchBackend
    from polybridge.backends.torch.trees import register

    register()
    return TorchBackend()


def _load_modules(backend: Backend) -> ModuleLibrary:
    from polybridge.backends.torch.modules import TorchModules

    return TorchModules(backend)
