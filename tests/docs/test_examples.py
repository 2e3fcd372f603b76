"""Runs every Python example of the README and of the docs, and holds their tables against the code."""

import inspect
import re
from pathlib import Path

import pytest

import polybridge

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source: str) -> None:
    exec(compile(source, "example", "exec"), {"__name__": "example"})


def test_examples_of_the_readme_are_short() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 10 for block in blocks)


def test_every_error_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    exceptions = [name for name, value in vars(polybridge).items() if inspect.isclass(value) and _is_concrete(value)]
    assert [name for name in exceptions if f"`{name}`" not in page] == []


def _is_concrete(cls: type) -> bool:
    abstract = {"PolybridgeError", "BackendError", "ArgumentError", "PolybridgeWarning"}
    return issubclass(cls, (polybridge.PolybridgeError, polybridge.PolybridgeWarning)) and cls.__name__ not in abstract
