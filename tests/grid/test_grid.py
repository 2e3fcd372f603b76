"""Every cell of the grid against the derivatives on paper, and the docs' tables against the grid."""

import builtins
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polybridge
from polybridge.core import errors
from tests.grid import cells
from tests.grid.analytic import BATCH, EXPECTED, X
from tests.grid.cells import COLUMNS, DIFFERENCES, LIMITS, NOT_APPLICABLE, WAYS, Case, Limit
from tests.grid.sources import wrapped

CASES = [case for pair in cells.pairs() for column in COLUMNS for case in cells.cases(*pair, column)]
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore::polybridge.LoopWarning", "ignore::DeprecationWarning")


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Every way of asking for every cell."""
    monkeypatch.setattr(errors, "_last", None)
    return request.param


def test_cell(case: Case) -> None:
    limit = cells.limit_of(case)
    if limit is None:
        assert_close(run(case), case)
    else:
        assert_raises(limit, case)


def run(case: Case) -> np.ndarray:
    """Return what the case asks for."""
    destination = importlib.import_module(f"tests.grid.in_{case.mode.framework}")
    return np.asarray(destination.run(case, *wrapped(case.src, case.mode.framework), _at(case)))


def _at(case: Case) -> np.ndarray:
    return BATCH if case.column == "vmap" else X


def assert_close(found: np.ndarray, case: Case) -> None:
    """Assert the dtype, and the values as precisely as the source can differentiate."""
    expected = EXPECTED[case.column]
    precision = {"value": 1e-12, "vmap": 1e-12, "second": 1e-6, "hessian": 1e-6}.get(case.column, 1e-9)
    precision = precision if case.src == DIFFERENCES else 1e-12
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=precision * np.abs(expected).max())


def assert_raises(limit: Limit, case: Case) -> None:
    """Assert that the error is raised, or remembered where a runtime has replaced it by its own."""
    error = getattr(polybridge, limit.error, None) or getattr(builtins, limit.error)
    with pytest.raises(Exception, match=limit.match) as raised:
        run(case)
    assert isinstance(raised.value, error) or isinstance(polybridge.last_error(), error)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.reason)
def test_a_limit_is_one_of_some_case(limit: Limit) -> None:
    assert any(cells.limit_of(case) is limit for case in CASES)


def test_what_cannot_be_asked_has_a_reason() -> None:
    missing = {(mode.framework, column) for mode in WAYS for column in COLUMNS if column not in WAYS[mode]}
    assert missing == set(NOT_APPLICABLE)


def printed(*arguments: str) -> str:
    """Return what the tool prints."""
    tool = [sys.executable, "tools/support_table.py", *arguments]
    return subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_table_in_the_readme_is_the_grid() -> None:
    assert printed() in (ROOT / "README.md").read_text()


def test_the_page_in_the_docs_is_the_grid() -> None:
    assert printed("--page") == (ROOT / "docs/support.md").read_text()
