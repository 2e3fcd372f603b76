"""Asks that pyproject.toml, constraints.txt, the tree and CONTRIBUTING.md agree with each other."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = sorted({*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)})
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_the_promised_extras_are_declared():
    assert set(EXTRAS) >= {"torch", "tensorflow", "keras", "jax", "all", "test", "docs", "bench", "demo"}


@pytest.mark.parametrize("line", [line for line in DIRECT if not line.startswith("polybridge[")])
def test_constraints_pin_each_direct_dependency_within_its_range(line):
    wanted = Requirement(line)
    pins = {canonicalize_name(name): version for name, version in (pin.split("==") for pin in PINS)}
    assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)])


def test_each_pin_is_a_name_and_one_exact_public_version():
    assert [pin for pin in PINS if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


@pytest.mark.parametrize("module", PROJECT["entry-points"]["polybridge"].values())
def test_an_entry_point_leads_to_a_package_of_the_tree(module):
    assert (ROOT / module.replace(".", "/") / "__init__.py").is_file()


@pytest.mark.parametrize("module", PROJECT["entry-points"]["polybridge"].values())
def test_the_command_of_a_missing_framework_installs_what_was_tested(module):
    """A newer one may lack what a backend uses of it."""
    plugin = importlib.import_module(module)
    hooks = (getattr(plugin, name, list) for name in ("polybridge_backends", "polybridge_modules"))
    requirements = [line for hook in hooks for offered in hook() for line in offered.requirement.split()]
    assert requirements and set(requirements) <= set(DIRECT)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "polybridge/py.typed").read_bytes() == b""


def test_contributing_is_short_enough_to_be_read():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
