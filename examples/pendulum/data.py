"""The true parameters, the noisy angles that are seen of them, and where the search starts."""

from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from .simulator import INTERVAL, SAMPLES, Parameters, simulate

Angles: TypeAlias = NDArray[np.float32]  # (SAMPLES,), in rad

TRUE = Parameters(frequency=1.7, damping=0.25, drive=0.9)
NOISE = 0.03  # rad, standard deviation
FARTHEST = 2.0  # a start is off by up to this factor, in either direction
TIMES = INTERVAL * np.arange(1, SAMPLES + 1)  # s


def observe(rng: np.random.Generator) -> Angles:
    """Return what a camera sees of the true pendulum."""
    angles = np.asarray(jax.jit(simulate)(Parameters(*map(np.float32, TRUE))))
    return angles + (NOISE * rng.standard_normal(SAMPLES)).astype(np.float32)


def starts(count: int, rng: np.random.Generator) -> Parameters:
    """Return guesses (count,) of each parameter, evenly spread in their logarithm."""
    factors = FARTHEST ** rng.uniform(-1, 1, (len(TRUE), count))
    return Parameters(*(np.float32(true * factor) for true, factor in zip(TRUE, factors, strict=True)))
