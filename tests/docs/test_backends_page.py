"""Holds the page on writing a backend against the contract and the toy plugin that it quotes."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import polybridge
from polybridge.core import hookspecs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/backends.md").read_text()
TOY = ROOT / "tests/toy_plugin"
PUBLIC = [name for name in vars(polybridge.Backend) if not name.startswith("_")]
DECLARED = [name for name in polybridge.Backend.__annotations__ if not name.startswith("_")]


def test_the_page_has_the_hook_with_its_exact_signature():
    source = inspect.getsource(hookspecs.polybridge_backends)
    _, signature, sentence = source.strip().splitlines()
    assert signature.partition("  #")[0] in PAGE
    assert sentence in PAGE


def test_every_hook_is_on_the_page():
    hooks = [name for name in vars(hookspecs) if name.startswith("polybridge_")]
    assert [name for name in hooks if f"def {name}(" not in PAGE] == []


@pytest.mark.parametrize("file", ["__init__.py", "backend.py"])
def test_the_page_quotes_the_toy_plugin(file):
    assert (TOY / "src/polybridge_toy" / file).read_text() in PAGE


def test_the_page_quotes_the_entry_point():
    (quoted,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert quoted in (TOY / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", sorted({*PUBLIC, *DECLARED}))
def test_everything_of_the_contract_is_on_the_page(name):
    assert re.search(rf"`{name}[(`]", PAGE)


def test_the_five_methods_of_the_table_are_the_required_ones():
    table = PAGE.partition("The five methods")[2].partition("What to know")[0]
    assert set(re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)) == polybridge.Backend.__abstractmethods__


@pytest.mark.parametrize("field", dataclasses.fields(polybridge.BackendPlugin), ids=lambda field: field.name)
def test_every_field_of_a_plugin_is_on_the_page(field):
    assert f"| `{field.name}` |" in PAGE
