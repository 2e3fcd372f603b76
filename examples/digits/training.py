"""Train a learner for some epochs and write down what happens; the same for every framework.

Bridged and native do the same arithmetic in another order, so their losses differ by float32 rounding.
Training multiplies any difference, which is why equality is asked of the early steps only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .data import Digits, Images, Labels

Logits: TypeAlias = NDArray[np.float32]  # (n, 10)

LEARNING_RATE = 0.02
MOMENTUM = 0.9  # at a constant rate, Keras's and PyTorch's momentum are the same arithmetic

EARLY_STEPS = 20
TOLERANCE = 8 * float(np.finfo(np.float32).eps)  # 9.5e-7; over 120 seeded runs the largest was 2.5e-7


class Step(NamedTuple):
    """One step's loss, and the gradient's 2-norm over the weights on either side of the seam."""

    loss: float
    extractor_norm: float
    head_norm: float


@dataclass(frozen=True)
class Learner:
    """A network with its optimisers, seen through NumPy: what the four training loops have in common."""

    step: Callable[[Images, Labels], Step]
    logits: Callable[[Images], Logits]

    def accuracy(self, images: Images, labels: Labels) -> float:
        """Return the share of images whose largest logit is the label's."""
        return float((self.logits(images).argmax(axis=1) == labels).mean())


@dataclass
class History:
    """What a training leaves behind: a Step per batch and a test accuracy per epoch."""

    steps: list[Step] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def losses(self) -> NDArray[np.float64]:
        return np.array([step.loss for step in self.steps])


def train(learner: Learner, digits: Digits, epochs: int, on_epoch: Callable[[History], None]) -> History:
    """Train for some epochs on batches that depend on nothing but the epoch's number."""
    history = History()
    for epoch in range(epochs):
        start = time.perf_counter()
        for images, labels in digits.batches(np.random.default_rng(epoch)):
            history.steps.append(learner.step(images, labels))
        history.seconds += time.perf_counter() - start
        history.accuracies.append(learner.accuracy(*digits.test))
        on_epoch(history)
    return history


@dataclass
class Comparison:
    """A network with a seam through it beside its native twin."""

    sides: tuple[str, str]  # the extractor's framework, the head's framework
    parameters: tuple[int, int]
    bridged: History = field(default_factory=History)
    native: History = field(default_factory=History)

    @property
    def title(self) -> str:
        return f"{self.sides[0]} extractor, {self.sides[1]} head"

    @property
    def twin(self) -> str:
        return f"  its twin, all in {self.sides[1]}"

    @property
    def differences(self) -> NDArray[np.float64]:
        """|bridged loss - native loss| / native loss, step by step."""
        return np.abs(self.bridged.losses - self.native.losses) / self.native.losses

    @property
    def early_difference(self) -> float:
        """The largest of the differences while rounding has had no time to grow."""
        return float(self.differences[:EARLY_STEPS].max())
