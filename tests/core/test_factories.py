"""Asks that a factory is found again by what was written down of it, and refused where it could not be."""

import collections
import functools
import json

import pytest

import polybridge
from polybridge.core import factories
from polybridge.core.factories import reference, resolve


class Outer:
    @staticmethod
    def build(width):
        return width


@pytest.mark.parametrize("factory", [collections.OrderedDict, Outer.build, json.dumps])
def test_an_importable_factory_is_found_by_name(factory):
    assert resolve(json.loads(json.dumps(reference(factory)))) is factory


def test_a_partial_keeps_its_arguments():
    found = resolve(json.loads(json.dumps(reference(functools.partial(dict, [["a", 1]], b=2)))))
    assert found() == {"a": 1, "b": 2}


def test_a_lambda_is_found_by_the_name_that_it_was_given(monkeypatch):
    monkeypatch.setattr(factories, "_registered", {})
    factory = polybridge.register_factory("net", lambda width: [width])
    assert reference(factory) == {"registered": "net"}
    assert resolve(reference(functools.partial(factory, 3)))() == [3]


def test_a_factory_that_no_import_finds_is_refused():
    with pytest.raises(polybridge.FactoryError, match=r"no import finds it.*register_factory"):
        reference(lambda: 1)


def test_arguments_that_json_does_not_hold_are_refused():
    with pytest.raises(polybridge.FactoryError, match="not what JSON holds"):
        reference(functools.partial(dict, a=(1, 2)))


@pytest.mark.parametrize("ref", [{"registered": "nobody"}, {"import": "no_such_module:f"}, {"import": "json:nothing"}])
def test_a_reference_that_leads_nowhere_says_so(ref):
    with pytest.raises(polybridge.FactoryError, match=r"cannot be found here.*importable, or call"):
        resolve(ref)


def test_what_cannot_be_called_is_no_factory():
    with pytest.raises(polybridge.FactoryError, match="got 3 of type int"):
        polybridge.register_factory("three", 3)
