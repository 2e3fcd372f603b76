"""Every cell of the grid against the analytic derivatives, and the docs' table against the grid."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.grid import runners
from tests.grid.cells import MODES, ORDERS, Mode

X = runners.X
ANALYTIC = {
    "value": X**3 * np.sin(X),
    "first": 3 * X**2 * np.sin(X) + X**3 * np.cos(X),
    "second": 6 * X * np.sin(X) + 6 * X**2 * np.cos(X) - X**3 * np.sin(X),
}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.runner)
def test_cell(mode: Mode, order: str) -> None:
    found = getattr(runners, mode.runner)()[ORDERS.index(order)]
    np.testing.assert_allclose(np.asarray(found), ANALYTIC[order], rtol=1e-12)


def test_the_table_in_the_readme_is_the_grid() -> None:
    table = subprocess.run([sys.executable, "tools/support_table.py"], cwd=ROOT, capture_output=True, text=True)
    assert table.returncode == 0, table.stderr
    assert table.stdout.strip() in (ROOT / "README.md").read_text()
