"""The sources that the tests of this folder run on."""

from types import SimpleNamespace

import pytest

from polybridge.core import residuals
from tests.torch_dst.sources import SOURCES, TENSORFLOW


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Every source: one that vectorises, and one for which everything is a loop."""
    return SOURCES[request.param]


@pytest.fixture
def tensorflow() -> SimpleNamespace:
    """The source that vectorises."""
    return TENSORFLOW


@pytest.fixture
def all_freed():
    """Afterwards no residual is left that was not there before, by reference counting alone."""
    before = set(residuals._residuals)
    yield
    assert set(residuals._residuals) <= before
