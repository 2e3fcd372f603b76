"""Asks what is known of an evaluation before it runs."""

import re

import pytest
import toy

import polybridge
from polybridge import TensorSpec
from polybridge.core import trees
from polybridge.core.abstract import Abstract, plan
from polybridge.core.exchange import Exchange
from polybridge.core.programs import UserFunction
from polybridge.core.relay import FunctionRelay
from polybridge.core.trees import Structure
from polybridge.core.wrapping import classifier

VECTOR = TensorSpec((3,), "float64")


@pytest.fixture
def plan_of(backend):
    """Return a function that plans an evaluation of a function of toy arrays of some specs."""

    def plan_of(fn, *specs, wanted=(0,), output_specs=None):
        _, treedef = trees.flatten(((None,) * len(specs), {}))
        structure = Structure(treedef, [None] * len(specs), tuple(range(len(specs))))
        relay = FunctionRelay(
            UserFunction(fn, "f", backend, structure, classifier(backend)), Exchange(backend, backend), output_specs
        )
        return relay.abstract(specs, wanted)

    return plan_of


def test_a_plan_has_the_specs_of_the_results(plan_of):
    found = plan_of(lambda x: (x.sum(), toy.array([1, 2])), VECTOR)
    assert found.specs == [TensorSpec((), "float64"), TensorSpec((2,), "int64")]
    assert found.differentiable == (True, False)


def test_a_plan_has_the_structure_of_the_result(plan_of):
    found = plan_of(lambda x: {"y": x, "n": 3}, VECTOR)
    assert found.structure.rebuild(["leaf"]) == {"y": "leaf", "n": 3}


def test_an_unknown_dimension_stays_unknown_where_it_has_influence(plan_of):
    found = plan_of(lambda x: (x, x.sum(0), x.sum(1)), TensorSpec((None, 3), "float64"))
    assert [spec.shape for spec in found.specs] == [(None, 3), (3,), (None,)]


def test_a_plan_tells_which_inputs_have_influence(plan_of):
    found = plan_of(lambda x, w: x * 2, VECTOR, VECTOR, wanted=(0, 1))
    assert found.connected == (True, False)


def test_the_plan_of_the_derivative_has_the_specs_of_the_inputs(plan_of):
    back = plan_of(lambda x, w: x.sum() ** 2, VECTOR, VECTOR, wanted=(0, 1)).back([VECTOR, VECTOR])
    assert back.specs == [VECTOR]
    assert back.differentiable == (True,)


def test_a_linear_function_has_no_second_derivative_in_the_plan(plan_of):
    back = plan_of(lambda x: 3 * x, VECTOR).back([VECTOR])
    assert back.connected == (False, True)


def test_given_specs_are_taken_without_running_the_function(plan_of):
    given = {"y": TensorSpec((None,), "float64"), "n": 3}
    found = plan_of(pytest.fail, VECTOR, output_specs=given)
    assert found.specs == [given["y"]]
    assert found.structure.rebuild(["leaf"]) == {"y": "leaf", "n": 3}
    assert found.connected is None


def raising(error):
    """Return a function that raises it."""

    def fails(x):
        raise error

    return fails


def test_a_function_that_needs_values_says_how_to_give_the_specs(plan_of, backend, monkeypatch):
    monkeypatch.setattr(type(backend), "needs_values", lambda self, error: isinstance(error, KeyError))
    with pytest.raises(polybridge.PromisedShapeError, match=r"float64\[3\].*KeyError: 'value'.*`output_specs=`"):
        plan_of(raising(KeyError("value")), VECTOR)


@pytest.mark.parametrize(
    ("shape", "note"), [((3,), r"`f` on placeholders float64\[3\], "), ((None,), r"\(of unknown sizes 16 and 24\)")]
)
def test_what_a_function_raises_besides_is_noted_to_come_of_placeholders(plan_of, shape, note):
    error = KeyError("mine")
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            plan_of(raising(error), TensorSpec(shape, "float64"))
        assert caught.value is error
    assert len(error.__notes__) == 1
    assert re.search(f"{note}.*If it fails on placeholders only, give `output_specs=`", error.__notes__[0])


def test_an_exception_that_takes_no_note_is_raised_without(plan_of):
    class Frozen(Exception):
        def __setattr__(self, name, value):
            if name != "__traceback__":  # which contexts of Python's own set
                raise AttributeError(name)

    with pytest.raises(Frozen):
        plan_of(raising(Frozen()), VECTOR)


def test_a_plan_runs_once_where_every_dimension_is_known():
    seen = []
    plan(lambda specs: seen.append(specs) or Abstract([], (), None, None), [VECTOR])
    assert seen == [[VECTOR]]
