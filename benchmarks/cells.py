"""One cell of the benchmark: its candidates are built, timed and set against the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import polybridge
from benchmarks.handwritten import by_rule
from benchmarks.modes import NATIVE_DRIVES, Mode, Step
from benchmarks.peers import Peer
from benchmarks.timing import Spread, interleave
from benchmarks.workloads import Function, Rule, Workload

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
        microseconds: by candidate: native, handwritten, polybridge, copy, and each peer.
        over_native: polybridge / native.
        over_handwritten: polybridge / hand-written.
        target: what `over_handwritten` may be: `target_seconds` / hand-written.
        over_target: polybridge / target; met where the median is at most 1.
        over_peers: polybridge / peer, by name.
    """

    cell: Cell
    rounds: int
    microseconds: dict[str, Spread]
    over_native: Spread
    over_handwritten: Spread
    target: Spread
    over_target: Spread
    over_peers: dict[str, Spread]

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
        over_peers={peer.name: Spread.of(ours / seconds[peer.name]) for peer in _peers(cell)},
    )


def candidates(cell: Cell) -> dict[str, Step]:
    """Return the steps to compare: native in the source, the bridges, and a copy of what enters torch."""
    mode, fn, rule = cell.mode, cell.workload.functions[cell.mode.src], cell.workload.rule
    of_numpy = mode.src == "numpy"
    x, ct = inputs(cell)

    def step(function: Callable[..., Any]) -> Step:
        return mode.drive(function, x, ct, cell.backward)

    return {
        "native": NATIVE_DRIVES[mode.src](by_rule(rule) if of_numpy else fn, x, ct, cell.backward),
        "handwritten": step(mode.handwritten(rule if of_numpy else fn)),
        "polybridge": step(wrap(cell, fn, rule)),
        "copy": _copy_step(cell, x),
        **{peer.name: step(peer.bridge(fn, x)) for peer in _peers(cell)},
    }


def wrap(cell: Cell, fn: Function, rule: Rule | None) -> Function:
    """Return `fn` wrapped by polybridge for the cell's mode, with the rule where the source has no derivatives."""
    return polybridge.wrap(fn, src=cell.mode.src, dst=cell.mode.dst, vjp=rule if cell.mode.src == "numpy" else None)


def _peers(cell: Cell) -> list[Peer]:
    return [peer for peer in cell.mode.peers if peer.installed]


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
