"""One small convolutional network in two halves, each written in Keras and in PyTorch.

The extractor turns an image into 512 features, the head turns features into ten logits. Whichever
framework builds a half, it starts from the same numbers.

Every layer is smooth, so that rounding stays rounding: under ReLU or max pooling a difference in the last bit
switches a unit now and then, and two runs part by 1e-4 within a few steps.
"""

from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import torch
from keras import layers
from numpy.typing import NDArray
from torch import nn

Arrays: TypeAlias = list[NDArray[np.float32]]


class Weights(NamedTuple):
    """A kernel and a bias for each layer, in Keras's layout: (h, w, in, out) and (in, out)."""

    extractor: Arrays
    head: Arrays


def initial_weights(seed: int = 0) -> Weights:
    """Draw He-normal kernels and zero biases."""
    rng = np.random.default_rng(seed)

    def draw(*kernel_shapes: tuple[int, ...]) -> Arrays:
        arrays = []
        for *fan_in, out in kernel_shapes:
            scale = np.sqrt(2 / np.prod(fan_in))
            arrays.append((scale * rng.standard_normal((*fan_in, out))).astype(np.float32))
            arrays.append(np.zeros(out, np.float32))
        return arrays

    return Weights(draw((3, 3, 1, 16), (3, 3, 16, 32)), draw((512, 64), (64, 10)))


def size(weights: Arrays) -> int:
    """Return the number of parameters."""
    return sum(array.size for array in weights)


def keras_extractor(weights: Arrays) -> keras.Sequential:
    """Build (n, 8, 8, 1) images -> (n, 512) features."""
    model = keras.Sequential([
        layers.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="silu"),
        layers.Conv2D(32, 3, padding="same", activation="silu"),
        layers.AveragePooling2D(2),
        layers.Flatten(),
    ])  # fmt: skip
    model.set_weights(weights)
    return model


def torch_extractor(weights: Arrays) -> nn.Sequential:
    """Build (n, 1, 8, 8) images -> (n, 512) features, in the order that Keras flattens them in."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.SiLU(),
        nn.AvgPool2d(2),
        ChannelsLast(),
        nn.Flatten(),
    )
    return _load(model, weights)


def keras_head(weights: Arrays) -> keras.Sequential:
    """Build (n, 512) features -> (n, 10) logits."""
    model = keras.Sequential([
        layers.Input((512,)),
        layers.Dense(64, activation="silu"),
        layers.Dense(10),
    ])  # fmt: skip
    model.set_weights(weights)
    return model


def torch_head(weights: Arrays) -> nn.Sequential:
    """Build (n, 512) features -> (n, 10) logits."""
    return _load(nn.Sequential(nn.Linear(512, 64), nn.SiLU(), nn.Linear(64, 10)), weights)


class ChannelsLast(nn.Module):
    """Move the channels of (n, c, h, w) behind the pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


def _load(model: nn.Sequential, weights: Arrays) -> nn.Sequential:
    to_torch = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}  # hwio -> oihw, io -> oi, and biases as they are
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(array.transpose(to_torch[array.ndim])))
    return model
