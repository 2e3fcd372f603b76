"""Say what was learnt: a table for the terminal, a figure for the eye, numbers for the record."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from .data import TIMES, TRUE, Angles
from .simulator import UNITS, Parameters
from .training import History

COLORS = Parameters("tab:green", "tab:orange", "tab:blue")


def table(history: History) -> Table:
    """Put each parameter in a row: the middle of all starts, and the one that is farthest from the truth."""
    recovered = history.parameters[-1]
    count = recovered.shape[1]
    grid = Table(title=f"A pendulum in JAX, learnt by PyTorch from {count} starts", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.caption = f"{len(history.losses)} updates in {history.seconds:.1f} s"
    grid.add_column("parameter", no_wrap=True)
    for heading in ("true", "recovered\n(median)", "largest\nerror"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, unit, true, found, errors in zip(Parameters._fields, UNITS, TRUE, recovered, history.errors, strict=True):
        grid.add_row(f"{name} ({unit})", f"{true:.3f}", f"{np.median(found):.4f}", f"{errors.max():.2%}")
    return grid


def write_json(history: History, tolerance: float, path: Path) -> None:
    """Write every number that the table and the figure's right half show."""
    learnt = dict(zip(Parameters._fields, np.stack(history.parameters, axis=1).tolist(), strict=True))
    losses = np.stack(history.losses).tolist()
    document = {"true": TRUE._asdict(), "tolerance": tolerance, "seconds": history.seconds}
    path.write_text(json.dumps({**document, "losses": losses, "parameters": learnt}))


def write_figure(history: History, angles: Angles, tolerance: float, path: Path) -> None:
    """Draw the angles with the worst start's fit, and each parameter of every start on its way."""
    figure, axes = plt.subplots(1, 2, figsize=(15, 5), layout="constrained")
    _fit(axes[0], history, angles)
    _ways(axes[1], np.stack(history.parameters) / np.array(TRUE)[:, None], tolerance)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _fit(axes: Axes, history: History, angles: Angles) -> None:
    assert history.first is not None and history.last is not None
    first, last = ((fit - angles).std(axis=1) for fit in (history.first, history.last))
    farthest = first.argmax()
    axes.plot(TIMES, angles, ".", color="black", markersize=3, label="observed, with noise")
    axes.plot(TIMES, history.first[farthest], color="tab:gray", linestyle="--", label="farthest start")
    axes.plot(TIMES, history.last[farthest], color="tab:red", label=f"learnt from it ({last[farthest]:.3f} rad off)")
    axes.set(xlabel="time (s)", ylabel="angle (rad)", title="The JAX simulator's angles")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")


def _ways(axes: Axes, ratios: NDArray[np.float64], tolerance: float) -> None:
    """Draw ratios (updates, parameters, starts) to the true parameters."""
    for name, color, of_starts in zip(Parameters._fields, COLORS, ratios.transpose(1, 0, 2), strict=True):
        axes.plot(of_starts, color=color, linewidth=1, alpha=0.5)
        axes.plot([], [], color=color, label=name)
    axes.axhspan(1 - tolerance, 1 + tolerance, color="black", alpha=0.3, label=f"true ± {tolerance:.0%}")
    axes.set(yscale="log", xlabel="update", ylabel="parameter / its true value", title="From every random start")
    axes.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
