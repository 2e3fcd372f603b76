"""Counts, rather than times: what a step copies, and how often it runs the user's function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import tensorflow as tf

from benchmarks.cells import Cell, inputs, wrap
from benchmarks.workloads import Function, Rule
from polybridge import observe

WARM_UP_STEPS = 10  # traces are made and lent tensors have been watched by then
STEPS = 10


@dataclass(frozen=True)
class Counts:
    """What one step costs once warm, other than time.

    Args:
        crossings: tensors that moved between the frameworks, per step.
        copies: how many of them were copied, per step.
        bytes_copied: per step.
        runs: how often the user's function was executed, per step; above 1 a forward is computed twice.
        first_entries: how often Python entered it during warm-up: for a source that traces, its traces.
        entries: how often Python entered it per warm step; 0 for a source that traces.
    """

    crossings: float
    copies: float
    bytes_copied: float
    runs: float
    first_entries: int
    entries: float


def count(cell: Cell) -> Counts:
    """Warm the wrapped function of `cell` up, run some steps, and return their averages."""
    counter = _Counter(cell)
    x, ct = inputs(cell)
    step = cell.mode.drive(wrap(cell, counter.function, counter.rule), x, ct, cell.backward)
    for _ in range(WARM_UP_STEPS):
        step()
    first_entries, runs_before = counter.entries, counter.runs
    with observe.count_crossings() as crossed:
        for _ in range(STEPS):
            step()
    return Counts(
        crossings=crossed.crossings / STEPS,
        copies=crossed.copies / STEPS,
        bytes_copied=crossed.bytes_copied / STEPS,
        runs=(counter.runs - runs_before) / STEPS,
        first_entries=first_entries,
        entries=(counter.entries - first_entries) / STEPS,
    )


class _Counter:
    """The cell's function, counting its runs: in the way of a source that may do without Python, where it may."""

    def __init__(self, cell: Cell) -> None:
        self.entries = 0
        self._src, self._fn = cell.mode.src, cell.workload.functions[cell.mode.src]
        self._executions = tf.Variable(0, trainable=False) if self._src == "tf" else None
        self._called_back = 0
        self.function: Function = lambda x: self._run(self._fn, x)
        self.rule: Rule | None = None
        if cell.workload.rule is not None:
            fwd, bwd = cell.workload.rule
            self.rule = (lambda x: self._run(fwd, x), bwd)

    @property
    def runs(self) -> int:
        """Return how often the function has been executed so far."""
        if self._src == "jax":
            jax.effects_barrier()
            return self._called_back
        return self.entries if self._executions is None else int(self._executions.numpy())

    def _run(self, fn: Function, x: Any) -> Any:
        self.entries += 1
        if self._executions is not None:
            self._executions.assign_add(1)
        if self._src == "jax":
            jax.debug.callback(self._executed)
        return fn(x)

    def _executed(self) -> None:
        self._called_back += 1
