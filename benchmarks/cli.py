"""The command line: which cells to measure, and where the results go."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from benchmarks.cells import Cell, measure
from benchmarks.counts import count
from benchmarks.modes import MODES
from benchmarks.plot import write_png
from benchmarks.report import Row, print_table, write_json
from benchmarks.threads import limit_threads
from benchmarks.workloads import WORKLOADS

SIZES = (16, 10_000, 1_000_000, 16_000_000)
QUICK_SIZES = (16, 10_000)
SECONDS, QUICK_SECONDS = 4.0, 0.3  # of rounds, per cell


class CommaSeparated(click.ParamType[tuple[Any, ...]]):
    """A comma-separated list, each part of which has a type of its own."""

    name = "list"

    def __init__(self, part: click.ParamType[Any]) -> None:
        """Convert each part by `part`."""
        self._part = part

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the converted parts; a tuple (a default) is left alone."""
        if isinstance(value, tuple):
            return value
        return tuple(self._part.convert(part.strip(), param, ctx) for part in value.split(","))


class Count(click.ParamType[int]):
    """A number of elements: 16, 1e6, 1.6e7."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the positive integer that `value` writes."""
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if number < 1 or number != int(number):
            self.fail(f"{value!r} is not a positive whole number", param, ctx)
        return int(number)


MODE_LIST = CommaSeparated(click.Choice(list(MODES)))
FUNCTION_LIST = CommaSeparated(click.Choice(list(WORKLOADS)))


@click.command()
@click.option("--quick", is_flag=True, help=f"Small sizes and {QUICK_SECONDS} s a cell: a look, not a measurement.")
@click.option("--sizes", type=CommaSeparated(Count()), help="Elements, such as 16,1e4,1e6,1.6e7.")
@click.option("--modes", type=MODE_LIST, default=tuple(MODES), help=f"Of {', '.join(MODES)}.")
@click.option("--functions", type=FUNCTION_LIST, default=("elementwise",), help=f"Of {', '.join(WORKLOADS)}.")
@click.option("--seconds", type=float, help=f"Of rounds, per cell; {SECONDS} by default.")
@click.option("--threads", default=1, show_default=True, help="Of each framework; more can time the scheduler.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=Path("out/bench.json"), show_default=True)
@click.option("--png", "png_path", type=click.Path(path_type=Path), help="Beside the JSON by default.")
def main(
    quick: bool,
    sizes: tuple[int, ...] | None,
    modes: tuple[str, ...],
    functions: tuple[str, ...],
    seconds: float | None,
    threads: int,
    json_path: Path,
    png_path: Path | None,
) -> None:
    """Time polybridge against the native function and the smallest hand-written bridge, interleaved."""
    sizes = sizes or (QUICK_SIZES if quick else SIZES)
    budget = seconds or (QUICK_SECONDS if quick else SECONDS)
    limit_threads(threads)
    cells = [
        Cell(WORKLOADS[function], MODES[mode], size, backward)
        for function, mode, backward, size in product(functions, modes, (False, True), sizes)
        if MODES[mode].src in WORKLOADS[function].functions
    ]
    console = Console(width=None if Console().is_terminal else 260)  # a pipe gets whole rows
    for peer in sorted({peer for mode in modes for peer in MODES[mode].peers if not peer.installed}, key=str):
        console.print(f"{peer.name} is not compared with: {peer.module} is not installed.")
    with Progress(console=console, transient=True) as progress:
        rows = [Row(measure(cell, budget), count(cell)) for cell in progress.track(cells, description="measuring")]
    print_table(rows, console)
    write_json(rows, threads, json_path)
    png_path = png_path or json_path.with_suffix(".png")
    write_png(rows, png_path)
    console.print(f"wrote {json_path} and {png_path}")
