"""Asks that calls nest in every order of the frameworks, three and four deep, with the right values, and never hang."""

import subprocess
import sys

import pytest

from tests.semantics import nesting, processes

GROUPS = [(framework, 0) for framework in nesting.FRAMEWORKS] + [("tensorflow", 1)]
"""The outermost framework, and the threads of TensorFlow's inter-op pool; 0 is as many as the machine has."""
LIMIT = 400  # seconds of a process


def names(framework):
    """Return the scenarios that start in a framework."""
    return [name for name in nesting.SCENARIOS if name.startswith(f"{framework} ")]


@pytest.fixture(scope="module")
def outcomes():
    """Return a function that gives how each scenario of a group ended, from one process for each group."""
    known = {}

    def outcomes(framework, pool):
        if (framework, pool) not in known:
            command = [sys.executable, "-m", "tests.semantics.nesting", str(pool), *names(framework)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LIMIT, cwd=processes.ROOT
            )
            lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
            known[framework, pool] = lines, done.stderr[-5000:]
        return known[framework, pool]

    return outcomes


@pytest.mark.parametrize(
    ("framework", "pool", "name"),
    [pytest.param(*group, name, id=f"{name}, pool {group[1]}") for group in GROUPS for name in names(group[0])],
)
def test_nested_calls_give_the_power(outcomes, framework, pool, name):
    found, last_words = outcomes(framework, pool)
    assert found.get(name) == "ok", f"{found.get(name)}\n{last_words}"
