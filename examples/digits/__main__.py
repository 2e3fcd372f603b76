"""The command line: train both runs beside their twins, report, and fail when a promise is broken."""

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import data, models, report, tf_loop, torch_loop
from .training import EARLY_STEPS, TOLERANCE, Comparison, History, Learner, train

RUNS = {torch_loop: ("Keras", "PyTorch"), tf_loop: ("PyTorch", "Keras")}
ACCURACY_BAR = 0.96


@click.command()
@click.option("--quick", is_flag=True, help="Train for 3 epochs instead of 30, and ask for no accuracy.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), help="Where the figure and numbers go.")
def main(quick: bool, out: Path) -> None:
    """Train a network across Keras and PyTorch, in both directions, beside its native twins."""
    console = Console()
    comparisons = compare_all(epochs=3 if quick else 30, console=console)

    out.mkdir(parents=True, exist_ok=True)
    report.write_figure(comparisons, out / "digits.png")
    report.write_json(comparisons, out / "digits.json")
    console.print(report.table(comparisons), f"Wrote {out / 'digits.png'} and {out / 'digits.json'}.", sep="\n")

    broken = [promise for run in comparisons for promise in broken_promises(run, 0 if quick else ACCURACY_BAR)]
    for promise in broken:
        console.print(f"[red]{promise}[/red]")
    raise SystemExit(bool(broken))


def compare_all(epochs: int, console: Console) -> list[Comparison]:
    """Train the four networks from the same weights on the same batches."""
    digits, initial = data.load(), models.initial_weights()
    parameters = models.size(initial.extractor), models.size(initial.head)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn()

    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:

        def follow(learner: Learner, description: str) -> History:
            task = progress.add_task(description, total=epochs, state="")

            def on_epoch(history: History) -> None:
                progress.update(task, advance=1, state=f"accuracy {history.accuracies[-1]:.2%}")

            return train(learner, digits, epochs, on_epoch)

        comparisons = []
        for loop, sides in RUNS.items():
            run = Comparison(sides, parameters)
            run.bridged = follow(loop.bridged(initial), run.title)
            run.native = follow(loop.native(initial), run.twin)
            comparisons.append(run)
    return comparisons


def broken_promises(run: Comparison, accuracy_bar: float) -> list[str]:
    """Say what this run owed and did not give."""
    broken = []
    if not run.early_difference <= TOLERANCE:  # also when it is NaN
        broken.append(
            f"{run.title}: the losses of the first {EARLY_STEPS} steps differ from the native ones by "
            f"{run.early_difference:.1e}, more than {TOLERANCE:.1e}."
        )
    if (accuracy := run.bridged.accuracies[-1]) < accuracy_bar:
        broken.append(f"{run.title}: the test accuracy is {accuracy:.2%}, less than {accuracy_bar:.0%}.")
    return broken


if __name__ == "__main__":
    main()
