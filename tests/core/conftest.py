"""Fixtures of the core's tests; asks that none of them needs a real framework."""

import sys

import pytest
import toy

import polybridge

FRAMEWORKS = {"torch", "tensorflow", "jax", "keras"}


@pytest.fixture(scope="package", autouse=True)
def no_framework_is_imported():
    before = FRAMEWORKS & set(sys.modules)
    yield
    assert FRAMEWORKS & set(sys.modules) == before


@pytest.fixture
def backend():
    """The toy backend."""
    return polybridge.get_backend("toy")


@pytest.fixture
def two():
    return toy.array(2.0)
