"""Small networks, each written in torch and in Keras, and batches of scikit-learn's digits for them.

Every activation is smooth, so that rounding stays rounding: under ReLU a difference in the last bit switches a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

Array = np.ndarray[Any, Any]

BATCH = 32
CLASSES = 10
NOISE = 6  # numbers that a generator makes an image of


@dataclass(frozen=True)
class Architecture:
    """A network in both frameworks.

    Args:
        kind: what it is trained for: "classify", "reconstruct" or "compete" (a generator and a critic).
        in_torch: makes its modules.
        in_keras: makes its models, of the global floating dtype.
        inputs: from images of shape (n, 8, 8) in [0, 1] to the arguments of the network.
    """

    kind: str
    in_torch: Callable[[], list[nn.Module]]
    in_keras: Callable[[], list[keras.Model]]
    inputs: Callable[[Array], tuple[Array, ...]]

    def batches(self, steps: int, dtype: str) -> Iterator[tuple[tuple[Array, ...], Array]]:
        """Yield the arguments and labels of each step."""
        images, labels = digits()
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.choice(len(images), BATCH, replace=False)
            inputs = self.inputs(images[chosen].astype(dtype))
            yield inputs, labels[chosen]


@cache
def digits() -> tuple[Array, Array]:
    """Return images of shape (n, 8, 8) in [0, 1], and their labels."""
    data = load_digits()
    return data.images / 16, data.target.astype(np.int64)


def flat(images: Array) -> tuple[Array, ...]:
    return (images.reshape(len(images), 64),)


def rows(images: Array) -> tuple[Array, ...]:
    return (images,)


def channels_last(images: Array) -> tuple[Array, ...]:
    return (images[..., None],)


def rows_and_mask(images: Array) -> tuple[Array, ...]:
    """Return the rows of pixels, and which of them are not empty."""
    return images, images.sum(axis=2) > 0


def tokens(images: Array) -> tuple[Array, ...]:
    return (np.rint(images.reshape(len(images), 64) * 16).astype(np.int64),)


def flat_with_noise(images: Array) -> tuple[Array, ...]:
    """Return images, noise to make others of, and how to mix both."""
    rng = np.random.default_rng(int(images.sum() * 16))
    noise = rng.normal(size=(len(images), NOISE)).astype(images.dtype)
    return images.reshape(len(images), 64), noise, rng.random((len(images), 1)).astype(images.dtype)


# torch.


class ChannelsFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x + self.body(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.encode = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        encoded = self.encode(self.embed(x), src_key_padding_mask=~mask)
        weights = mask.to(x.dtype)[..., None]
        return self.head((encoded * weights).sum(1) / weights.sum(1))


class Tied(nn.Module):
    """An autoencoder whose decoder is the transposed encoder, with one inner layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 16)
        self.inner, self.again = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.again.weight = self.inner.weight
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(self.again(torch.tanh(self.inner(torch.tanh(self.encoder(x))))))
        return F.linear(code, self.encoder.weight.t(), self.bias)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.hidden, self.head = nn.Linear(64 * 8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x).flatten(1))))


def torch_cnn() -> nn.Module:
    return nn.Sequential(
        ChannelsFirst(),
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, CLASSES),
    )


def torch_resnet() -> nn.Module:
    return nn.Sequential(
        ChannelsFirst(),
        nn.Conv2d(1, 6, 3, padding=1),
        Residual(6),
        Residual(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def torch_mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, outputs, bias=outputs > 1))


# Keras.


def keras_residual(x: Any, channels: int) -> Any:
    y = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
    y = layers.Activation("silu")(layers.BatchNormalization()(y))
    y = layers.Conv2D(channels, 3, padding="same", use_bias=False)(y)
    return layers.Activation("silu")(layers.Add()([x, layers.BatchNormalization()(y)]))


def keras_cnn() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(6, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("silu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def keras_resnet() -> keras.Model:
    image = layers.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, padding="same")(image)
    x = keras_residual(keras_residual(x, 6), 6)
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def keras_recurrent() -> keras.Model:
    return keras.Sequential([layers.Input((8, 8)), layers.LSTM(12), layers.Dense(CLASSES)])


class Called(keras.Model):
    """A functional model that is called with its inputs one by one, as a module of torch is."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model
        self.built = True

    def call(self, *inputs: Any) -> Any:
        return self.model(list(inputs))


def keras_attentive() -> keras.Model:
    x, mask = layers.Input((8, 8)), layers.Input((8,), dtype="bool")
    embedded = layers.Dense(16)(x)
    attended = layers.MultiHeadAttention(4, 4, use_bias=False)(embedded, embedded, attention_mask=mask[:, None, :])
    y = layers.LayerNormalization()(embedded + attended)
    y = layers.LayerNormalization()(y + layers.Dense(16)(layers.Dense(32, activation="gelu")(y)))
    weights = ops.cast(mask, y.dtype)[..., None]
    pooled = ops.sum(y * weights, axis=1) / ops.sum(weights, axis=1)
    return Called(keras.Model([x, mask], layers.Dense(CLASSES)(pooled)))


class KerasTied(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.inner = layers.Dense(16, activation="tanh"), layers.Dense(16, activation="tanh")
        self.bias = self.add_weight(shape=(64,), initializer="zeros", name="bias")
        self.encoder.build((None, 64))
        self.inner.build((None, 16))
        self.built = True

    def call(self, x: Any) -> Any:
        code = self.inner(self.inner(self.encoder(x)))
        return ops.matmul(code, ops.transpose(self.encoder.kernel)) + self.bias


def keras_bag() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((64,), dtype="int64"),
            layers.Embedding(17, 8),
            layers.Flatten(),
            layers.Dense(16, activation="tanh"),
            layers.Dense(CLASSES),
        ]
    )


def keras_mlp(inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential(
        [layers.Input((inputs,)), layers.Dense(24, activation="tanh"), layers.Dense(outputs, use_bias=outputs > 1)]
    )


ARCHITECTURES = {
    "mlp": Architecture("classify", lambda: [torch_mlp(64, CLASSES)], lambda: [keras_mlp(64, CLASSES)], flat),
    "cnn with batch norm": Architecture("classify", lambda: [torch_cnn()], lambda: [keras_cnn()], channels_last),
    "resnet": Architecture("classify", lambda: [torch_resnet()], lambda: [keras_resnet()], channels_last),
    "lstm": Architecture("classify", lambda: [Recurrent()], lambda: [keras_recurrent()], rows),
    "transformer": Architecture("classify", lambda: [Attentive()], lambda: [keras_attentive()], rows_and_mask),
    "tied autoencoder": Architecture("reconstruct", lambda: [Tied()], lambda: [KerasTied()], flat),
    "embedding": Architecture("classify", lambda: [Bag()], lambda: [keras_bag()], tokens),
    "gan with gradient penalty": Architecture(
        "compete",
        lambda: [torch_mlp(NOISE, 64), torch_mlp(64, 1)],
        lambda: [keras_mlp(NOISE, 64), keras_mlp(64, 1)],
        flat_with_noise,
    ),
}
