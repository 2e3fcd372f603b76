"""torch's modules as pure functions, and the modules of others as `torch.nn.Module`s."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

from polybridge.backends.torch.bridged import BridgedModule
from polybridge.backends.torch.functional import TorchFunctional
from polybridge.core.bridge import Bridge
from polybridge.core.functional import Functional
from polybridge.core.modules import ModuleLibrary


class TorchModules(ModuleLibrary):
    """`torch.nn`."""

    name = "torch"
    classes = (torch.nn.Module,)
    builds = True

    def functional(self, value: Any) -> Functional | None:
        """Return an `nn.Module` as a function."""
        if not isinstance(value, torch.nn.Module):
            return None
        return TorchFunctional(value, self.backend)

    def native(self, bridge: Bridge) -> BridgedModule:
        """Return an `nn.Module`."""
        return BridgedModule(bridge, self)
