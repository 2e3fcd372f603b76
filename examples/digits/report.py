"""Say what the runs showed: a table for the terminal, a figure for the eye, numbers for the record."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from .training import EARLY_STEPS, TOLERANCE, Comparison, History, Step

BRIDGED: dict[str, Any] = {"linewidth": 4, "alpha": 0.45, "solid_capstyle": "round"}
NATIVE: dict[str, Any] = {"color": "black", "linewidth": 1, "marker": ".", "markersize": 4}
LOSS, EXTRACTOR, HEAD = "tab:green", "tab:orange", "tab:blue"


def table(comparisons: list[Comparison]) -> Table:
    """Put each run in a row and its native twin below it."""
    grid = Table(title="One network, two frameworks", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    grid.caption = f"bound on the loss difference: {TOLERANCE:.1e}"
    grid.add_column("network", no_wrap=True)
    for heading in ("parameters", "test\naccuracy", f"loss diff.,\n{EARLY_STEPS} steps", "seconds"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for run in comparisons:
        grid.add_row(
            run.title,
            " + ".join(f"{count:,}" for count in run.parameters),
            f"{run.bridged.accuracies[-1]:.2%}",
            f"{run.early_difference:.1e}",
            f"{run.bridged.seconds:.1f}",
        )
        grid.add_row(
            run.twin,
            f"{sum(run.parameters):,}",
            f"{run.native.accuracies[-1]:.2%}",
            "",
            f"{run.native.seconds:.1f}",
            end_section=True,
        )
    return grid


def write_json(comparisons: list[Comparison], path: Path) -> None:
    """Write every number that the table and the figure show."""
    runs = [
        {
            "run": run.title,
            "parameters": run.parameters,
            "early_difference": run.early_difference,
            "bridged": _columns(run.bridged),
            "native": _columns(run.native),
        }
        for run in comparisons
    ]
    path.write_text(json.dumps({"early_steps": EARLY_STEPS, "tolerance": TOLERANCE, "runs": runs}))


def write_figure(comparisons: list[Comparison], path: Path) -> None:
    """Draw each run as a row: loss, test accuracy, gradient norms, difference from the native twin."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure, rows = plt.subplots(len(comparisons), 4, figsize=(17, 4 * len(comparisons)), layout=layout)
    for row, run in zip(rows, comparisons, strict=True):
        for axes, draw in zip(row, (_losses, _accuracies, _norms, _differences), strict=True):
            draw(axes, run)
            axes.grid(alpha=0.25)
            axes.legend(loc="lower right" if draw is _accuracies else "upper right")
        row[0].set_title(run.title, loc="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _losses(axes: Axes, run: Comparison) -> None:
    _epochs(axes, _epoch_means(run.bridged, "loss"), color=LOSS, label="bridged", **BRIDGED)
    _epochs(axes, _epoch_means(run.native, "loss"), label="native twin", **NATIVE)
    axes.set(yscale="log", ylabel="training loss, mean of the epoch")


def _accuracies(axes: Axes, run: Comparison) -> None:
    _epochs(axes, run.bridged.accuracies, color=LOSS, label="bridged", **BRIDGED)
    _epochs(axes, run.native.accuracies, label="native twin", **NATIVE)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set(ylim=(None, 1), ylabel="test accuracy")


def _norms(axes: Axes, run: Comparison) -> None:
    frameworks = dict(zip(("extractor", "head"), run.sides, strict=True))
    for half, color in (("extractor", EXTRACTOR), ("head", HEAD)):
        label = f"{half} ({frameworks[half]})"
        _epochs(axes, _epoch_means(run.bridged, f"{half}_norm"), color=color, label=label, **BRIDGED)
        _epochs(axes, _epoch_means(run.native, f"{half}_norm"), **NATIVE)
    axes.plot([], [], label="native twin", **NATIVE)
    axes.set(yscale="log", ylabel="gradient norm, mean of the epoch")


def _differences(axes: Axes, run: Comparison) -> None:
    steps = np.arange(1, len(run.differences) + 1)
    axes.axvspan(1, EARLY_STEPS, color=LOSS, alpha=0.12)
    axes.hlines(TOLERANCE, 1, EARLY_STEPS, color="tab:red", label=f"bound for {EARLY_STEPS} steps: {TOLERANCE:.1e}")
    axes.plot(steps, run.differences, "k.", markersize=3, label="|bridged − native| / native")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-8, linscale=0.5)  # many differences are exactly 0
    top = max(1e-2, 100 * run.differences.max())  # leaves room for the legend
    axes.set(xlabel="step", ylabel="relative difference of the loss", ylim=(-2e-9, top))


def _epochs(axes: Axes, values: Sequence[float] | NDArray[np.float64], **style: Any) -> None:
    axes.plot(np.arange(1, len(values) + 1), values, **style)
    axes.set(xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _epoch_means(history: History, quantity: str) -> NDArray[np.float64]:
    values = np.array(_columns(history)[quantity])
    return values.reshape(len(history.accuracies), -1).mean(axis=1)


def _columns(history: History) -> dict[str, Any]:
    steps = zip(*history.steps, strict=True)
    columns = dict(zip(Step._fields, map(list, steps), strict=True))
    return {"seconds": history.seconds, "test_accuracy": history.accuracies, **columns}
