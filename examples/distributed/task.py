"""The task of all examples here: the same batches everywhere, and a bound on how far results may be apart."""

from collections.abc import Iterator, Sequence

import numpy as np

Array = np.ndarray
RATE, STEPS, BATCH, FEATURES = 0.1, 3, 8, 6


def batches(part: int = 0, parts: int = 1) -> Iterator[tuple[Array, Array]]:
    """Yield batches of examples and targets, or one of several equal parts of each."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES)).astype("float32")
        yield x[part::parts], np.tanh(x.sum(axis=1, keepdims=True))[part::parts]


def report(name: str, found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Print how far two sets of weights are apart, and fail where that is more than rounding."""
    worst = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    print(f"{name}: weights differ by {worst:.0e} from those of one process", flush=True)
    if not worst < 1e-6:  # also NaN
        raise SystemExit(1)
