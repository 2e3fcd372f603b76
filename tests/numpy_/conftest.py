"""The frameworks on the other side."""

import pytest

from tests.pairs.dialects import NAMES, Dialect, dialect


@pytest.fixture(scope="session", params=NAMES)
def other(request: pytest.FixtureRequest) -> Dialect:
    """A framework with derivatives of its own."""
    return dialect(request.param)
