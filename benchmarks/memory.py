"""How much the process grows per 20,000 calls, per mode and pass, each in a process of its own.

`python -m benchmarks.memory`; Linux only (it reads /proc/self/statm). A relay that keys residuals by call, or
makes a wrapper per call, grows by 13 KB to 1.5 MB a call; the limit here is about 100 bytes a call, below
which the allocator's own drift hides it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

CALLS = 20_000
WARM_UP_CALLS = 3_000  # traces, thread pools and the allocator's arenas have settled by then
LIMIT_MEGABYTES = 2.0  # per CALLS
SIZE = 16
MODE_NAMES = ("torch-eager", "tf-eager", "tf-function", "tf1-graph", "torch-eager-from-jax", "jax-jit")
CANDIDATES = ("handwritten", "polybridge")


@click.command()
@click.option("--calls", default=CALLS, show_default=True, help="Calls between the two readings.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(MODE_NAMES),
    default=MODE_NAMES,
    help="Repeatable; or all.",
)
@click.option("--candidate", type=click.Choice(CANDIDATES), default="polybridge", show_default=True)
def main(calls: int, modes: tuple[str, ...], candidate: str) -> None:
    """Print by how many megabytes `--calls` steps of each mode grow the process; exit with 1 if too many."""
    table = Table("mode", "pass", "MB grown", "limit", "met", title=f"{candidate}: growth over {calls:,} calls")
    limit = LIMIT_MEGABYTES * calls / CALLS
    failed = False
    for mode, backward in product(modes, (False, True)):
        grown = measure_in_subprocess(candidate, mode, backward, calls)
        failed |= grown >= limit
        label = "forward+backward" if backward else "forward"
        table.add_row(mode, label, f"{grown:.2f}", f"{limit:.2f}", "[green]yes[/]" if grown < limit else "[red]no[/]")
    Console().print(table)
    sys.exit(failed)


def measure_in_subprocess(candidate: str, mode: str, backward: bool, calls: int) -> float:
    """Run `growth` in a fresh interpreter, whose heap holds nothing else, and return the megabytes grown."""
    arguments = repr((candidate, mode, backward, calls))
    code = f"from benchmarks.memory import growth; print(growth(*{arguments}))"
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(finished.stdout.splitlines()[-1])


def growth(candidate: str, mode: str, backward: bool, calls: int) -> float:
    """Return by how many megabytes this process grows over `calls` steps of `candidate`, after a warm-up."""
    from benchmarks.cells import Cell, candidates  # here: the parent process needs no framework
    from benchmarks.modes import MODES
    from benchmarks.workloads import ELEMENTWISE

    step = candidates(Cell(ELEMENTWISE, MODES[mode], SIZE, backward))[candidate]
    for _ in range(WARM_UP_CALLS):
        step()
    before = _resident_megabytes()
    for _ in range(calls):
        step()
    return _resident_megabytes() - before


def _resident_megabytes() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
