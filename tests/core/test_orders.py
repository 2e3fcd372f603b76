"""Asks that the pull of any order and the push are what calculus says, for x**5 and for products."""

import math

import pytest
import toy

from polybridge.core import orders

ONE = toy.array(1.0)


def values(tensors):
    """Return numbers, None for what is not there."""
    return [None if x is None else x.value.tolist() for x in tensors]


def fifth(order):
    """Return the derivative of x**5 at 2."""
    return float(math.perm(5, order) * 2 ** (5 - order))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_pull_gives_the_derivative_of_its_order(relay_of, two, order):
    """Each order's cotangents are for all results of the order before; the one for x alone is not zero."""
    _, back = relay_of(lambda x: x**5).vjp([two], [0])
    cts, results = [[ONE]], 1
    for _ in range(order - 1):
        cts.append([ONE, *[toy.array(0.0)] * (results - 1)])
        results += len(cts[-2])
    assert values(orders.pull(back, [two], cts))[0] == fifth(order)


def test_the_second_pull_is_the_derivative_in_the_cotangent_too(relay_of, two):
    """pull(x, ct) = 5 ct x**4, of which 20 ct x**3 t and 5 x**4 t are the cotangents at t."""
    _, back = relay_of(lambda x: x**5).vjp([two], [0])
    found = orders.pull(back, [two], [[toy.array(3.0)], [toy.array(7.0)]])
    assert values(found) == [20 * 3 * 8 * 7.0, 80 * 7.0]


def test_the_third_pull_mixes_all_of_them(relay_of, two):
    """Of (20 ct x**3 t, 5 x**4 t) with the cotangents (u, v): in x, ct and t."""
    _, back = relay_of(lambda x: x**5).vjp([two], [0])
    ct, t, u, v = (toy.array(n) for n in (3.0, 7.0, 2.0, 5.0))
    expected = [60 * 3 * 4 * 7 * 2 + 20 * 8 * 7 * 5, 20 * 8 * 7 * 2, 20 * 3 * 8 * 2 + 80 * 5]
    assert values(orders.pull(back, [two], [[ct], [t], [u, v]])) == [float(n) for n in expected]


def test_nothing_depends_on_an_input_without_influence(relay_of, two):
    """Of x**3 beside an unused w; the cotangent for its result, which is None, is not looked at."""
    _, back = relay_of(lambda w, x: x**3, 2).vjp([two, two], [0, 1])
    assert values(orders.pull(back, [two, two], [[ONE]])) == [None, 12.0]
    for unused in (None, toy.array(100.0)):
        assert values(orders.pull(back, [two, two], [[ONE], [unused, ONE]])) == [None, 12.0, 12.0]


def test_a_missing_cotangent_is_zero(relay_of, two):
    _, back = relay_of(lambda x: (x**2, x**3)).vjp([two], [0])
    assert values(orders.pull(back, [two], [[None, ONE]])) == [12.0]


def test_primals_need_not_be_at_hand(relay_of, two):
    _, back = relay_of(lambda x, w: x**2 * w, 2).vjp([two, two], [0, 1])
    given = orders.pull(back, [two, two], [[ONE], [ONE, ONE]])
    assert values(orders.pull(back, [None, None], [[ONE], [ONE, ONE]])) == values(given) == [8.0, 4.0, 12.0]


def test_the_function_runs_once_whatever_the_order(relay_of, two):
    calls = []
    _, back = relay_of(lambda x: (calls.append(1), x**2)[1]).vjp([two], [0])
    orders.pull(back, [two], [[ONE]])
    assert calls == [1]


def test_a_push_is_the_derivative_in_a_direction(relay_of, two):
    """Of (x**5, x w) in the direction (3, 1) at (2, 7): 240, and 3 w + x."""
    seven = toy.array(7.0)
    _, back = relay_of(lambda x, w: (x**5, x * w), 2).vjp([two, seven], [0, 1])
    zeros = [toy.array(0.0)] * 2
    assert values(orders.push(back, [two, seven], zeros, [toy.array(3.0), ONE])) == [240.0, 23.0]


def test_a_push_of_a_constant_is_none_which_is_zero(relay_of, two):
    _, back = relay_of(lambda x: (toy.array(5.0), x), 1).vjp([two], [0])
    assert values(orders.push(back, [two], [ONE] * 2, [ONE])) == [None, 1.0]
