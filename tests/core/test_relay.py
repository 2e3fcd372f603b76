"""Asks the laws of relays, with a toy function called from toy itself: every derivative is again a relay."""

import gc
import weakref

import numpy as np
import pytest
import toy

import polybridge

ONE = toy.array(1.0)


def numbers(outcome):
    """Return what the leaves of an outcome hold, None for what is not there."""
    return [None if x is None else x.value.tolist() for x in outcome.leaves]


def power(x):
    return x**5


def test_a_relay_evaluates_its_function(relay_of, two):
    assert numbers(relay_of(power)([two])) == [32.0]


def test_vjp_evaluates_the_function_too(relay_of, two):
    assert numbers(relay_of(power).vjp([two], [0])[0]) == [32.0]


def test_an_outcome_rebuilds_the_functions_own_result(relay_of, two):
    outcome = relay_of(lambda x: {"y": x * 2, "name": "double", "more": [x, None]})([two])
    result = outcome.structure.rebuild(outcome.leaves)
    assert result["y"].value == 4.0
    assert (result["name"], result["more"][1]) == ("double", None)


def test_back_takes_primals_and_cotangents(relay_of, two):
    _, back = relay_of(power).vjp([two], [0])
    assert numbers(back([two, ONE])) == [80.0]


def test_back_may_be_called_twice(relay_of, two):
    _, back = relay_of(power).vjp([two], [0])
    assert numbers(back([two, ONE])) == numbers(back([two, ONE])) == [80.0]


def test_back_is_bound_to_its_own_evaluation(relay_of, two):
    relay = relay_of(power)
    _, back = relay.vjp([two], [0])
    relay.vjp([ONE], [0])
    assert numbers(back([two, ONE])) == [80.0]


def test_every_derivative_is_a_relay(relay_of, two):
    """The derivatives of x**5 at 2 are 80, 160, 240, 240, 120, each by the vjp of the one before."""
    _, back = relay_of(power).vjp([two], [0])
    xs, found = [two, ONE], []
    for _ in range(5):
        outcome, further = back.vjp(xs, [0])
        found += numbers(outcome)
        xs, back = [two, ONE], further
    assert found == [80.0, 160.0, 240.0, 240.0, 120.0]


def test_a_cotangent_has_a_derivative_too(relay_of, two):
    """back(x, ct) is 5 ct x**4; its derivatives are 20 ct x**3 and 5 x**4."""
    _, back = relay_of(power).vjp([two], [0])
    _, further = back.vjp([two, toy.array(3.0)], [0, 1])
    assert numbers(further([two, toy.array(3.0), ONE])) == [480.0, 80.0]


def test_derivatives_mix_across_inputs(relay_of, two):
    """Of x**2 w**3 at (2, 3): d/dx is 108, d/dw is 108, and d/dw d/dx is 108."""
    relay, three = relay_of(lambda x, w: x**2 * w**3, 2), toy.array(3.0)
    _, back = relay.vjp([two, three], [0, 1])
    assert numbers(back([two, three, ONE])) == [108.0, 108.0]
    _, further = back.vjp([two, three, ONE], [1])
    assert numbers(further([three, ONE, None])) == [108.0]


def test_only_wanted_inputs_have_cotangents(relay_of, two):
    _, back = relay_of(lambda x, w: x * w, 2).vjp([two, toy.array(3.0)], [1])
    assert numbers(back([toy.array(3.0), ONE])) == [2.0]


def test_an_input_without_influence_has_no_cotangent(relay_of, two):
    _, back = relay_of(lambda x, w: x * 3, 2).vjp([two, two], [0, 1])
    outcome = back([two, two, ONE])
    assert numbers(outcome) == [3.0, None]
    assert outcome.differentiable == (True, False)


def test_an_input_without_influence_stays_so_at_second_order(relay_of, two):
    _, back = relay_of(lambda x, w: x**2, 2).vjp([two, two], [0, 1])
    outcome, further = back.vjp([two, two, ONE], [0, 1, 2])
    assert numbers(outcome) == [4.0, None]
    assert numbers(further([two, two, ONE, ONE])) == [2.0, None, 4.0]


def test_the_same_array_may_be_two_inputs(relay_of, two):
    _, back = relay_of(lambda x, w: x * w**2, 2).vjp([two, two], [0, 1])
    assert numbers(back([two, two, ONE])) == [4.0, 8.0]


def test_the_same_array_may_be_two_outputs(relay_of, two):
    def twice(x):
        y = x**2
        return y, y

    _, back = relay_of(twice).vjp([two], [0])
    assert numbers(back([two, ONE, toy.array(10.0)])) == [44.0]


def test_an_output_may_be_the_input_itself(relay_of, two):
    outcome, back = relay_of(lambda x: x).vjp([two], [0])
    assert numbers(outcome) == [2.0]
    assert numbers(back([two, toy.array(7.0)])) == [7.0]


def test_a_missing_cotangent_counts_as_zero(relay_of, two):
    _, back = relay_of(lambda x: (x**2, x**3)).vjp([two], [0])
    assert numbers(back([two, None, ONE])) == [12.0]


def test_integer_outputs_take_no_cotangent(relay_of, two):
    outcome, back = relay_of(lambda x: (x**2, toy.array(7), x**3)).vjp([two], [0])
    assert outcome.differentiable == (True, False, True)
    assert numbers(back([two, ONE, ONE])) == [16.0]


def test_numpy_results_become_constants(relay_of, two):
    outcome, back = relay_of(lambda x: (x**2, np.ones(2))).vjp([two], [0])
    assert numbers(outcome) == [4.0, [1.0, 1.0]]
    assert numbers(back([two, ONE, None])) == [4.0]


def test_the_function_runs_once_for_a_value_and_its_gradient(relay_of, two):
    calls = []
    _, back = relay_of(lambda x: calls.append(x) or x**2).vjp([two], [0])
    back([two, ONE])
    back([two, ONE])
    assert len(calls) == 1


def test_residuals_go_with_the_pullback(relay_of, two):
    """Nothing that polybridge keeps may hold an evaluation alive."""
    relay, kept = relay_of(lambda x: kept.append(weakref.ref(x)) or x**2), []
    _, back = relay.vjp([two], [0])
    assert kept[0]() is not None
    del back
    gc.collect()
    assert kept[0]() is None


def test_an_evaluation_without_derivative_keeps_nothing(relay_of, two):
    relay, kept = relay_of(lambda x: kept.append(weakref.ref(x)) or x**2), []
    relay([two])
    gc.collect()
    assert kept[0]() is None


def test_a_function_that_returns_no_tensor_has_no_derivative(relay_of, two):
    with pytest.raises(polybridge.OutputError, match=r"`f`.*returned no tensor \(got str: 'text'"):
        relay_of(lambda x: "text").vjp([two], [0])


def test_a_function_that_returns_no_tensor_may_be_evaluated(relay_of, two):
    outcome = relay_of(lambda x: "text")([two])
    assert outcome.structure.rebuild(outcome.leaves) == "text"


def test_an_exception_of_the_function_keeps_its_type(relay_of, two):
    with pytest.raises(ZeroDivisionError):
        relay_of(lambda x: 1 / 0).vjp([two], [0])


def test_a_relay_works_after_its_function_has_raised(relay_of, two):
    answers = iter([None, 3])
    relay = relay_of(lambda x: x ** next(answers))
    with pytest.raises(TypeError):
        relay.vjp([two], [0])
    assert numbers(relay.vjp([two], [0])[0]) == [8.0]


def test_an_outcome_may_get_other_leaves(relay_of, two):
    outcome = relay_of(lambda x: [x, x])([two]).with_leaves(["a", "b"])
    assert outcome.structure.rebuild(outcome.leaves) == ["a", "b"]
