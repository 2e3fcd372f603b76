"""Prints the table of pairs, modes and orders, as Markdown, from the tests' own grid."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.grid.cells import MODES, ORDERS


def main() -> None:
    """Print a row per mode."""
    print(f"| function | caller | mode | {' | '.join(ORDERS)} |")
    print(f"|{'---|' * (3 + len(ORDERS))}")
    for mode in MODES:
        print(f"| {mode.src} | {mode.dst} | {mode.name} | {' | '.join('yes' for _ in ORDERS)} |")


if __name__ == "__main__":
    main()
