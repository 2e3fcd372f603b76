"""torch's modules that are lists and dicts of parameters, as what they stand for."""

from __future__ import annotations

import torch

from polybridge.core.trees import register_like


def register() -> None:
    """Teach polybridge's trees the containers that a module keeps its parameters in."""
    register_like(torch.nn.ParameterList, list)
    register_like(torch.nn.ParameterDict, dict)
