"""The picture: ratio to the hand-written bridge against size, a panel per mode."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report import Row


def write_png(rows: list[Row], path: Path) -> None:
    """Draw every workload (a row of panels) and mode (a column) of `rows` into `path`."""
    workloads = list(dict.fromkeys(row.timing.cell.workload.name for row in rows))
    modes = list(dict.fromkeys(row.timing.cell.mode.name for row in rows))
    size = (3.6 * len(modes) + 0.8, 3.2 * len(workloads) + 0.6)
    figure, grid = plt.subplots(
        len(workloads), len(modes), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for panels, workload in zip(grid, workloads, strict=True):
        for axes, mode in zip(panels, modes, strict=True):
            _panel(
                axes,
                [r for r in rows if (r.timing.cell.workload.name, r.timing.cell.mode.name) == (workload, mode)],
            )
        panels[0].set_ylabel(f"{workload}\ntime / hand-written bridge")
    grid[0, 0].legend(fontsize="small")
    figure.suptitle("polybridge against the smallest hand-written DLPack bridge (median and quartiles; dashed: target)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Axes, rows: list[Row]) -> None:
    for label, colour in (("forward", "tab:blue"), ("forward+backward", "tab:orange")):
        timings = [row.timing for row in rows if row.timing.cell.label == label]
        sizes = [timing.cell.size for timing in timings]
        ratios = [timing.over_handwritten for timing in timings]
        below = [ratio.median - ratio.low for ratio in ratios]
        above = [ratio.high - ratio.median for ratio in ratios]
        axes.errorbar(
            sizes,
            [r.median for r in ratios],
            [below, above],
            color=colour,
            marker="o",
            capsize=3,
            label=label,
        )
        axes.plot(sizes, [timing.target.median for timing in timings], color=colour, linestyle="--", alpha=0.6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="float32 elements", title=rows[0].timing.cell.mode.name)
    axes.set_ylim(bottom=0)
