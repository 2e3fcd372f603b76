"""Scikit-learn's 1,797 handwritten digits of 8x8 pixels, split once and for all."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Images: TypeAlias = NDArray[np.float32]  # (n, 8, 8, 1), in 0..1: channels last, as TensorFlow has them
Labels: TypeAlias = NDArray[np.int64]  # (n,), in 0..9
Batch: TypeAlias = tuple[Images, Labels]

TRAIN_SIZE = 1400
BATCH_SIZE = 50  # divides TRAIN_SIZE, so that every batch has the same shape


@dataclass(frozen=True)
class Digits:
    """The train and the test split."""

    train: Batch
    test: Batch

    def batches(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Yield one epoch of shuffled training batches."""
        images, labels = self.train
        for chosen in rng.permutation(len(labels)).reshape(-1, BATCH_SIZE):
            yield images[chosen], labels[chosen]


def load(seed: int = 0) -> Digits:
    """Split the digits into 1,400 to train on and 397 to test on, each class in proportion."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype(np.int64), train_size=TRAIN_SIZE, stratify=labels, random_state=seed
    )
    return Digits((train_x, train_y), (test_x, test_y))


def channels_first(images: Images) -> Images:
    """Reorder (n, height, width, channels) to PyTorch's (n, channels, height, width)."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
