"""Times candidates interleaved in one process, so that drift hits all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WARM_UP_CALLS = 10
WARM_UP_SECONDS = 0.5  # whichever comes first, but three calls at least
BATCH_SECONDS = 4e-3  # a batch shorter than this measures the clock, and the caches that others have left
MIN_ROUNDS, MAX_ROUNDS = 15, 400


@dataclass(frozen=True)
class Spread:
    """A median and its interquartile range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray) -> Spread:
        """Return the spread of `samples`."""
        low, median, high = np.percentile(samples, [25, 50, 75])
        return cls(float(median), float(low), float(high))


def interleave(steps: dict[str, Callable[[], Any]], budget: float) -> dict[str, np.ndarray]:
    """Time a batch of every step once a round, in an order drawn anew for each round; all batches take as long.

    A fixed or rotating order would let each candidate inherit the same neighbour's caches and sleeping
    threads every time: two copies of one bridge then differ by up to 10%.

    Garbage collection stays on: it is part of what a step costs its user.

    Args:
        steps: the candidates by name.
        budget: how long the rounds may take together, in seconds.

    Returns:
        By candidate, the seconds per call in each round; index i is the same round for all.
    """
    gc.collect()
    single = {name: _warm_up(step) for name, step in steps.items()}
    batches = {name: max(1, round(BATCH_SECONDS / seconds)) for name, seconds in single.items()}
    spent = sum(batches[name] * seconds for name, seconds in single.items())
    rounds = int(np.clip(budget / spent, MIN_ROUNDS, MAX_ROUNDS))
    generator = np.random.default_rng(seed=0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in generator.permutation(list(steps)):
            seconds[name].append(_time(steps[name], batches[name]))
    return {name: np.array(samples) for name, samples in seconds.items()}


def _warm_up(step: Callable[[], Any]) -> float:
    """Run `step` until it is traced, cached and trusted; return the seconds of its fastest call."""
    fastest, spent = float("inf"), 0.0
    for call in range(WARM_UP_CALLS):
        elapsed = _time(step, 1)
        fastest, spent = min(fastest, elapsed), spent + elapsed
        if spent > WARM_UP_SECONDS and call >= 2:
            break
    return fastest


def _time(step: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls
