"""The command line: learn from many random starts, report, and fail when one of them misses."""

from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import data, report
from .training import UPDATES, History, train

TOLERANCE = 0.01  # of each parameter


@click.command()
@click.option("--quick", is_flag=True, help="Learn from 4 random starts instead of 16.")
@click.option("--seed", default=0, show_default=True, help="Of the noise and of the starts.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), help="Where the figure and numbers go.")
def main(quick: bool, seed: int, out: Path) -> None:
    """Recover a pendulum's parameters from noisy angles: a JAX simulator in a PyTorch training loop."""
    console = Console()
    rng = np.random.default_rng(seed)
    angles = data.observe(rng)
    history = learn(angles, data.starts(4 if quick else 16, rng), console)

    out.mkdir(parents=True, exist_ok=True)
    report.write_figure(history, angles, TOLERANCE, out / "pendulum.png")
    report.write_json(history, TOLERANCE, out / "pendulum.json")
    console.print(report.table(history), f"Wrote {out / 'pendulum.png'} and {out / 'pendulum.json'}.", sep="\n")

    missed = int((~(history.errors <= TOLERANCE)).any(axis=0).sum())  # also those that are NaN
    if missed:
        console.print(f"[red]{missed} starts miss a parameter by more than {TOLERANCE:.0%}.[/red]")
    raise SystemExit(bool(missed))


def learn(angles: data.Angles, starts: data.Parameters, console: Console) -> History:
    """Train, and show how far the farthest start still is."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task("JAX pendulum, PyTorch loop", total=UPDATES, state="")

        def on_update(history: History) -> None:
            progress.update(task, advance=1, state=f"largest error {history.errors.max():.2%}")

        return train(starts, angles, UPDATES, on_update)


if __name__ == "__main__":
    main()
