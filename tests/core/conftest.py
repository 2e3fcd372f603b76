"""Fixtures of the core's tests; asks that none of them needs a real framework."""

import sys

import pytest
import toy

import polybridge
from polybridge.core import trees
from polybridge.core.exchange import Exchange
from polybridge.core.programs import UserFunction
from polybridge.core.relay import FunctionRelay
from polybridge.core.trees import Structure
from polybridge.core.wrapping import classifier

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


@pytest.fixture
def relay_of(backend):
    """Return a function that makes the relay of a function of `count` toy arrays."""

    def relay_of(fn, count=1):
        _, treedef = trees.flatten(((None,) * count, {}))
        structure = Structure(treedef, [None] * count, tuple(range(count)))
        return FunctionRelay(UserFunction(fn, "f", backend, structure, classifier(backend)), Exchange(backend, backend))

    return relay_of
