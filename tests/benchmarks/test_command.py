"""The command runs end to end on the smallest size. Nothing here asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.modes import MODES

ROOT = Path(__file__).parents[2]


def test_quick_run_writes_json_and_png(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    # a process of its own: TensorFlow's threads, which the command sets, can be set only before it has run
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--sizes",
        "16",
        "--seconds",
        "0.01",
        "--json",
        str(path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    rows = json.loads(path.read_text())["rows"]
    assert {row["mode"] for row in rows} == set(MODES)
    assert path.with_suffix(".png").stat().st_size > 0


def test_sizes_that_are_not_whole_are_refused() -> None:
    result = CliRunner().invoke(main, ["--sizes", "1.5"])
    assert result.exit_code == 2
    assert "'1.5' is not a positive whole number" in result.output
