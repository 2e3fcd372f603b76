"""Results as a table for people, and as JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorflow as tf
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cells import LARGE_FACTOR, SMALL_FACTOR, SMALL_SIZE, Timing
from benchmarks.counts import Counts
from benchmarks.timing import Spread


@dataclass(frozen=True)
class Row:
    """One line of the report: a timed cell and its counts."""

    timing: Timing
    counts: Counts


def print_table(rows: list[Row], console: Console) -> None:
    """Print microseconds per step, per-round ratios as `median [quartiles]`, and counts per step."""
    table = Table(title="polybridge: ratios are medians over interleaved rounds, with quartiles")
    for heading in ("function", "mode", "pass", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("native us", "by hand us", "ours us", "copy us", "/native", "/by hand", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met", justify="center")
    table.add_column("/peer (its limit)", no_wrap=True)
    for heading in ("crossings", "copies", "bytes", "runs", "entries"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row), end_section=row is rows[-1] or _section(row) != _section(rows[rows.index(row) + 1]))
    console.print(table)
    console.print(
        f"target: {SMALL_FACTOR} x by hand; above {SMALL_SIZE:,} elements {LARGE_FACTOR} x by hand, plus the "
        "copy of outputs and gradients into torch.\n"
        "the limit of a peer is for small calls, forward and backward.\n"
        "runs: executions of the user's function a step; entries: by Python, warm-up + a step.",
        highlight=False,
    )


def write_json(rows: list[Row], threads: int, path: Path) -> None:
    """Write every row, the environment and the number of threads of each framework to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment() | {"threads": threads}, "rows": [_record(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Return what the numbers depend on besides our code."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {module.__name__: module.__version__ for module in (np, tf, torch, jax)},
    }


def _cells(row: Row) -> list[str]:
    timing, counts = row.timing, row.counts
    cell = timing.cell
    microseconds = [
        f"{timing.microseconds[name].median:,.1f}" for name in ("native", "handwritten", "polybridge", "copy")
    ]
    return [
        cell.workload.name,
        cell.mode.name,
        cell.label,
        f"{cell.size:,}",
        *microseconds,
        _ratio(timing.over_native),
        _ratio(timing.over_handwritten),
        f"{timing.target.median:.2f}",
        "[green]yes[/]" if timing.met else "[red]no[/]",
        "\n".join(
            f"{peer.name} {_ratio(timing.over_peers[peer.name])} ({peer.limit:.2f})"
            for peer in cell.mode.peers
            if peer.name in timing.over_peers
        ),
        f"{counts.crossings:g}",
        f"{counts.copies:g}",
        f"{counts.bytes_copied:,.0f}",
        f"{counts.runs:g}",
        f"{counts.first_entries}+{counts.entries:g}",
    ]


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.low:.2f}-{spread.high:.2f}]".replace("[", r"\[")


def _section(row: Row) -> tuple[str, str]:
    return row.timing.cell.workload.name, row.timing.cell.mode.name


def _record(row: Row) -> dict[str, Any]:
    timing, cell = row.timing, row.timing.cell
    return {
        "function": cell.workload.name,
        "mode": cell.mode.name,
        "src": cell.mode.src,
        "dst": cell.mode.dst,
        "pass": cell.label,
        "size": cell.size,
        "rounds": timing.rounds,
        "microseconds": {name: asdict(spread) for name, spread in timing.microseconds.items()},
        "over_native": asdict(timing.over_native),
        "over_handwritten": asdict(timing.over_handwritten),
        "target": asdict(timing.target),
        "over_target": asdict(timing.over_target),
        "met": timing.met,
        "over_peers": {name: asdict(spread) for name, spread in timing.over_peers.items()},
        "counts": asdict(row.counts),
    }
