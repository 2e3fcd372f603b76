"""The pairs that every test in this folder runs on."""

import pytest

from tests.pairs.dialects import PAIRS, Dialect, Pair, dialect


@pytest.fixture(scope="session", params=PAIRS, ids="->".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Every ordered pair of frameworks."""
    return Pair(*map(dialect, request.param))


@pytest.fixture(scope="session")
def src(pair: Pair) -> Dialect:
    """The framework that the wrapped function is written in."""
    return pair.src


@pytest.fixture(scope="session")
def dst(pair: Pair) -> Dialect:
    """The framework that calls it."""
    return pair.dst
