"""One cell of the benchmark: its candidates are built, timed and set against the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import polybridge
from benchmarks.modes import NATIVE_DRIVES, Mode, Step
from benchmarks.timing import Spread, interleave
from benchmarks.workloads import Workload

SMALL_SIZE = 100_000  # elements; up to here overhead decides, above it memory traffic
SMALL_FACTOR = 1.3
LARGE_FACTOR = 1.1


@dataclass(frozen=True)
class Cell:
    """What is measured: `backward` says whether the step is forward and backward, or forward alone."""

    workload: Workload
    mode: Mode
    size: int
    backward: bool

    @property
    def label(self) -> str:
        """Return the name of the pass."""
        return "forward+backward" if self.backward else "forward"


@dataclass(frozen=True)
class Timing:
    """The measured cell: microseconds per step by candidate, and polybridge's per-round ratios.

    Args:
        cell: what was measured.
        rounds: how many rounds the spreads are over.
        microseconds: by candidate: native, handwritten, polybridge, copy.
        over_native: polybridge / native.
        over_handwritten: polybridge / hand-written.
        target: what `over_handwritten` may be: `target_seconds` / hand-written.
        over_target: polybridge / target; met where the median is at most 1.
    """

    cell: Cell
    rounds: int
    microseconds: dict[str, Spread]
    over_native: Spread
    over_handwritten: Spread
    target: Spread
    over_target: Spread

    @property
    def met(self) -> bool:
        """Return whether the median round meets the target."""
        return self.over_target.median <= 1.0


def measure(cell: Cell, budget: float) -> Timing:
    """Build the candidates of `cell`, time them for `budget` seconds, and return the ratios."""
    seconds = interleave(candidates(cell), budget)
    handwritten, ours = seconds["handwritten"], seconds["polybridge"]
    target = target_seconds(cell, handwritten, seconds["copy"])
    return Timing(
        cell=cell,
        rounds=len(ours),
        microseconds={name: Spread.of(samples * 1e6) for name, samples in seconds.items()},
        over_native=Spread.of(ours / seconds["native"]),
        over_handwritten=Spread.of(ours / handwritten),
        target=Spread.of(target / handwritten),
        over_target=Spread.of(ours / target),
    )


def candidates(cell: Cell) -> dict[str, Step]:
    """Return the steps to compare: native in the source, both bridges, and a copy of what enters torch."""
    mode, fn = cell.mode, cell.workload.functions[cell.mode.src]
    x, ct = inputs(cell)
    return {
        "native": NATIVE_DRIVES[mode.src](fn, x, ct, cell.backward),
        "handwritten": mode.drive(mode.handwritten(fn), x, ct, cell.backward),
        "polybridge": mode.drive(wrap(cell, fn), x, ct, cell.backward),
        "copy": _copy_step(cell, x),
    }


def wrap(cell: Cell, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` wrapped by polybridge for the cell's mode."""
    return polybridge.wrap(fn, src=cell.mode.src, dst=cell.mode.dst)


def inputs(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Return the cell's input and cotangent, always the same."""
    generator = np.random.default_rng(seed=0)
    shape = cell.workload.shape(cell.size)
    return generator.random(shape, np.float32), generator.random(shape, np.float32)


def target_seconds(cell: Cell, handwritten: np.ndarray, copy: np.ndarray) -> np.ndarray:
    """Return the time that polybridge may take in each round.

    A large step into torch may also copy its output and gradient once: torch writes in place and has to
    own them.
    """
    if cell.size <= SMALL_SIZE:
        return SMALL_FACTOR * handwritten
    return LARGE_FACTOR * handwritten + (copy if cell.mode.dst == "torch" else 0.0)


def _copy_step(cell: Cell, x: np.ndarray) -> Step:
    """Return a step that clones as many bytes as the step's output, and gradient if there is one."""
    tensor = torch.from_numpy(x)
    return (lambda: (tensor.clone(), tensor.clone())) if cell.backward else tensor.clone
