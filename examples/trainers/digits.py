"""What the trainers here train: handwritten digits, and a Keras classifier of them as a PyTorch module."""

import keras
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import polybridge


def loaders(batch: int = 64) -> tuple[DataLoader, DataLoader]:
    """Return 1,408 images to learn from and 384 to test on, 64 pixels each, from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, test = TensorDataset(images[:1408], labels[:1408]), TensorDataset(images[1408:1792], labels[1408:1792])
    return DataLoader(train, batch, shuffle=True), DataLoader(test, batch)


def classifier() -> torch.nn.Module:
    """Return a classifier with statistics, which follow `.train()` and `.eval()`, and with dropout."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
    return polybridge.wrap(model, dst="torch")
