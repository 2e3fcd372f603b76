"""Prints what works, as Markdown, from the tests' own grid: the README's table, or the docs' page with `--page`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.grid.cells import COLUMNS, LIMITS, MODES, NOT_APPLICABLE, SOURCES, WAYS, Limit, Side, cases, pairs, status

HEADER = ("function", "caller", *COLUMNS)
PAGE = """# What works

x³ sin(x) Σx, a function of three numbers in float64 that mixes its elements, is wrapped from every framework, called
and differentiated in every mode of every other one by that framework's own means, and compared with the derivatives on
paper. `tools/support_table.py` prints this page from the grid that the tests run (`tests/grid`).

"yes" is a tested result; "no" a tested error, which is explained below; "n/a" something that the caller's framework has
no means to ask for.
"""


def main() -> None:
    """Print the table, or the page."""
    lines = page() if "--page" in sys.argv else table(HEADER, compact())
    print("\n".join(lines))


def compact() -> Iterator[list[str]]:
    """Yield the rows of the table, with the sources and then the modes of equal cells in one."""
    sources: dict[tuple[Side, str, tuple[str, ...]], list[Side]] = {}
    for src, mode in pairs():
        sources.setdefault((mode, src.framework, statuses(src, mode)), []).append(src)
    modes: dict[tuple[tuple[Side, ...], str, tuple[str, ...]], list[Side]] = {}
    for (mode, _, found), alike in sources.items():
        modes.setdefault((tuple(alike), mode.framework, found), []).append(mode)
    return ([names(alike), names(merged), *found] for (alike, _, found), merged in modes.items())


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield PAGE
    yield from table(HEADER, ([str(src), str(mode), *statuses(src, mode)] for src, mode in pairs()))
    yield "\n## What does not\n"
    for limit in LIMITS:
        yield f"- **{where(limit)}**: `{limit.error}`. {limit.reason}"
    for (framework, column), reason in NOT_APPLICABLE.items():
        yield f"- **{framework}, {column}**: n/a. {reason}"
    yield "\n## How it is asked\n"
    yield "A cell is a yes if one of these ways works; the list above names those that do not.\n"
    yield from table(("caller", *COLUMNS), ([str(m), *(ways(m, column) for column in COLUMNS)] for m in MODES))


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    columns = list(header)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def statuses(src: Side, mode: Side) -> tuple[str, ...]:
    """Return the cells of a row."""
    return tuple(status(src, mode, column) for column in COLUMNS)


def names(sides: list[Side] | tuple[Side, ...]) -> str:
    """Return kinds or modes of one framework."""
    return f"{sides[0].framework}: {', '.join(side.name for side in sides)}"


def where(limit: Limit) -> str:
    """Return which cases a limit covers, as it says itself."""
    covered = [case for pair in pairs() for c in limit.columns for case in cases(*pair, c) if limit.covers(case)]
    parts = [
        "" if limit.sources == SOURCES else f"{names(limit.sources)} functions",
        "" if limit.modes == MODES else names(limit.modes),
        "" if limit.columns == COLUMNS else " and ".join(limit.columns),
        f"by {', '.join(f'`{way}`' for way in dict.fromkeys(case.way for case in covered))}" if limit.ways else "",
    ]
    return ", ".join(filter(None, parts))


def ways(mode: Side, column: str) -> str:
    """Return how a column is asked for."""
    return ", ".join(way if way == "a call" else f"`{way}`" for way in WAYS[mode].get(column, ())) or "n/a"


if __name__ == "__main__":
    main()
