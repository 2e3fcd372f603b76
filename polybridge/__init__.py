"""A function of one array framework as a native, differentiable function of another.

`wrap(fn, src="tf", dst="torch")` is the front door. Importing polybridge imports no framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

from polybridge.core.backend import Backend, Narrowing, Pullback
from polybridge.core.bridge import Bridge
from polybridge.core.errors import (
    ArgumentError,
    BackendError,
    BackendNotInstalledError,
    BrokenPluginError,
    CompilationError,
    CotangentError,
    DetachedStateWarning,
    EndingError,
    FactoryError,
    ForkError,
    LoopWarning,
    MutationError,
    NotCallableError,
    NotDifferentiableError,
    OutputError,
    PolybridgeError,
    PolybridgeWarning,
    PrecisionWarning,
    PromisedShapeError,
    RandomnessError,
    ResidualError,
    UnbuiltError,
    UnknownBackendError,
    UnsupportedModuleError,
    UnsupportedTensorError,
    UntracedWarning,
    WeightsError,
    WrongFrameworkError,
    last_error,
)
from polybridge.core.factories import register_factory
from polybridge.core.functional import Functional, Ran, Slot, Weights
from polybridge.core.hookspecs import BackendPlugin, ModulePlugin, hookimpl
from polybridge.core.modules import ModuleLibrary
from polybridge.core.registry import get_backend, list_backends
from polybridge.core.relay import Outcome, Relay
from polybridge.core.specs import TensorSpec
from polybridge.core.wrapping import convert, wrap

if TYPE_CHECKING:  # so that an editor knows them; `__getattr__` imports them
    from polybridge import compat as compat
    from polybridge import keras as keras
    from polybridge import observe as observe
    from polybridge import testing as testing
    from polybridge import tf1 as tf1

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Backend",
    "BackendError",
    "BackendNotInstalledError",
    "BackendPlugin",
    "Bridge",
    "BrokenPluginError",
    "CompilationError",
    "CotangentError",
    "DetachedStateWarning",
    "EndingError",
    "FactoryError",
    "ForkError",
    "Functional",
    "LoopWarning",
    "ModuleLibrary",
    "ModulePlugin",
    "MutationError",
    "Narrowing",
    "NotCallableError",
    "NotDifferentiableError",
    "Outcome",
    "OutputError",
    "PolybridgeError",
    "PolybridgeWarning",
    "PrecisionWarning",
    "PromisedShapeError",
    "Pullback",
    "Ran",
    "RandomnessError",
    "Relay",
    "ResidualError",
    "Slot",
    "TensorSpec",
    "UnbuiltError",
    "UnknownBackendError",
    "UnsupportedModuleError",
    "UnsupportedTensorError",
    "UntracedWarning",
    "Weights",
    "WeightsError",
    "WrongFrameworkError",
    "convert",
    "get_backend",
    "hookimpl",
    "last_error",
    "list_backends",
    "register_factory",
    "wrap",
]

_LAZY = ("compat", "keras", "observe", "testing", "tf1")  # each may import a framework, so only when it is asked for


def __getattr__(name: str) -> Any:
    """Import a submodule at its first use as an attribute."""
    if name in _LAZY:
        return importlib.import_module(f"polybridge.{name}")
    raise AttributeError(f"module 'polybridge' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that a shell completes, submodules that nobody has imported yet included."""
    return sorted({*globals(), *_LAZY})
