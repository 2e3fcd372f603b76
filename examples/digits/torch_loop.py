"""Run 1: a Keras extractor trained from a PyTorch loop, and its twin, which is PyTorch throughout."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

import polybridge

from .data import Images, Labels, channels_first
from .models import Weights, keras_extractor, torch_extractor, torch_head
from .training import LEARNING_RATE, MOMENTUM, Learner, Logits, Step


def bridged(initial: Weights) -> Learner:
    """Keras features, a PyTorch head."""
    extractor = polybridge.wrap(keras_extractor(initial.extractor), dst="torch")  # the seam: an nn.Module
    return _learner(extractor, torch_head(initial.head), torch.from_numpy)


def native(initial: Weights) -> Learner:
    """The same network with nothing to cross."""
    extractor = torch_extractor(initial.extractor)
    return _learner(extractor, torch_head(initial.head), lambda images: torch.from_numpy(channels_first(images)))


def _learner(extractor: nn.Module, head: nn.Module, tensor: Callable[[Images], torch.Tensor]) -> Learner:
    model = nn.Sequential(extractor, head)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    def step(images: Images, labels: Labels) -> Step:
        loss = cross_entropy(model(tensor(images)), torch.from_numpy(labels))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        return Step(loss.item(), *(_gradient_norm(half) for half in (extractor, head)))

    @torch.no_grad()
    def logits(images: Images) -> Logits:
        return model(tensor(images)).numpy()

    return Learner(step, logits)


def _gradient_norm(module: nn.Module) -> float:
    return get_total_norm([weight.grad for weight in module.parameters() if weight.grad is not None]).item()
