"""Asks that a batch is what its examples are one by one, vectorised by the source or in a loop."""

import warnings

import numpy as np
import pytest
import toy
from polybridge_toy.backend import ToyBackend

import polybridge
from polybridge.core import orders
from polybridge.core.batching import Looped, batched
from polybridge.core.specs import TensorSpec

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
W = np.array([2.0, 3.0])
CT = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


class Vectorising(ToyBackend):
    """toy with a vectorisation of its own, which counts its calls."""

    def __init__(self):
        self.calls = 0

    def vmap(self, fn, axes):
        """Return the function of batches."""

        def mapped(*xs):
            self.calls += 1
            size = next(x.shape[axis] for x, axis in zip(xs, axes, strict=True) if axis is not None)
            rows = [
                fn(*(x if a is None else x[(slice(None),) * a + (i,)] for x, a in zip(xs, axes, strict=True)))
                for i in range(size)
            ]
            return [stacked(column) for column in zip(*rows, strict=True)]

        return mapped


def stacked(xs):
    """Return arrays along a new first axis."""
    return toy.operation([np.stack([x.value for x in xs])], xs, lambda cts: [cts[0][i] for i in range(len(xs))])[0]


@pytest.fixture(params=["vectorised", "looped"])
def backend(request):
    """toy, with a vectorisation of its own and without."""
    return Vectorising() if request.param == "vectorised" else polybridge.get_backend("toy")


@pytest.fixture
def quiet():
    """Let loops be silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polybridge.LoopWarning)
        yield


def arrays(*values):
    """Return arrays of toy."""
    return [toy.array(value) for value in values]


def numbers(outcome):
    """Return what the leaves of an outcome hold."""
    return [None if x is None else x.value for x in outcome.leaves]


def total(x, w):
    """Return what a function of the whole batch would get wrong: x w divided by the sum of one example."""
    return x * w / x.sum()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("axis", [0, 1])
def test_each_example_is_normalised_by_itself(relay_of, axis):
    relay = batched(relay_of(total, 2), (axis, None))
    (found,) = numbers(relay(arrays(np.moveaxis(X, 0, axis), W)))
    np.testing.assert_allclose(found, X * W / X.sum(1, keepdims=True))


@pytest.mark.usefixtures("quiet")
def test_what_examples_share_gets_the_sum_of_their_cotangents(relay_of):
    xs = arrays(X, W)
    _, back = batched(relay_of(lambda x, w: x**2 * w, 2), (0, None)).vjp(xs, [0, 1])
    dx, dw = numbers(back([*xs, toy.array(CT)]))
    np.testing.assert_allclose(dx, 2 * X * W * CT)
    np.testing.assert_allclose(dw, (X**2 * CT).sum(0))


@pytest.mark.usefixtures("quiet")
def test_a_cotangent_lies_along_the_axis_of_its_input(relay_of):
    xs = arrays(X.T, W)
    _, back = batched(relay_of(lambda x, w: x**2 * w, 2), (1, None)).vjp(xs, [0])
    (dx,) = numbers(back([xs[0], toy.array(CT)]))
    np.testing.assert_allclose(dx, (2 * X * W * CT).T)


@pytest.mark.usefixtures("quiet")
def test_the_second_derivative_of_a_batch(relay_of):
    """<x**2 w, ct> has the gradients 2 x w ct and x**2 ct; their sum with weights one, differentiated again."""
    xs = arrays(X, W)
    _, back = batched(relay_of(lambda x, w: x**2 * w, 2), (0, None)).vjp(xs, [0, 1])
    dx, dw, dct = (x.value for x in orders.pull(back, xs, [arrays(CT), arrays(np.ones_like(X), np.ones_like(W))]))
    np.testing.assert_allclose(dx, 2 * W * CT + 2 * X * CT)
    np.testing.assert_allclose(dw, (2 * X * CT).sum(0))
    np.testing.assert_allclose(dct, 2 * X * W + X**2)


@pytest.mark.usefixtures("quiet")
def test_a_batch_of_batches(relay_of):
    """Over the examples, and inside of that over two weights."""
    weights = np.stack([W, W * 2])
    relay = batched(batched(relay_of(total, 2), (None, 0)), (0, None))
    (found,) = numbers(relay(arrays(X, weights)))
    np.testing.assert_allclose(found, (X / X.sum(1, keepdims=True))[:, None] * weights)


@pytest.mark.usefixtures("quiet")
def test_the_structure_of_the_result_is_that_of_one_example(relay_of):
    outcome = batched(relay_of(lambda x: {"y": x * 2, "n": toy.array(7)}), (0,))(arrays(X))
    found = outcome.structure.rebuild(outcome.leaves)
    np.testing.assert_array_equal(found["y"].value, X * 2)
    assert found["n"].value.tolist() == [7, 7, 7] and outcome.differentiable.count(True) == 1


def test_the_plan_of_a_batch_has_its_size_first_and_the_influences_of_one_example(relay_of):
    relay = batched(relay_of(lambda x, w: x**2, 2), (0, None))
    plan = relay.abstract([TensorSpec((None, 2), "float64"), TensorSpec((2,), "float64")], [0, 1])
    assert plan.specs == [TensorSpec((None, 2), "float64")]
    assert plan.connected == (True, False)


# Which of the two it is.


def test_the_batched_form_is_made_once(relay_of):
    relay = relay_of(total, 2)
    assert batched(relay, (0, None)) is batched(relay, (0, None)) is not batched(relay, (0, 0))


@pytest.mark.parametrize("backend", ["vectorised"], indirect=True)
def test_a_source_that_vectorises_is_asked_to_and_nothing_is_said(backend, relay_of):
    relay = batched(relay_of(total, 2), (0, None))
    relay(arrays(X, W))  # and once on placeholders, to see whether it can be
    relay.vjp(arrays(X, W), [0])
    assert backend.calls == 3


@pytest.mark.parametrize("backend", ["looped"], indirect=True)
def test_a_loop_is_said_once(relay_of):
    relay = batched(relay_of(total, 2), (0, None))
    with pytest.warns(polybridge.LoopWarning, match=r"`f`.*one example.*toy has no vectorisation"):
        relay(arrays(X, W))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relay(arrays(X, W))
        relay.vjp(arrays(X, W), [0])


@pytest.mark.usefixtures("quiet")
def test_an_error_of_the_function_is_raised_as_it_is(relay_of):
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        batched(relay_of(broken), (0,))(arrays(X))


# Loops.


def looped(relay, axes):
    """Return the loop over a batch."""
    return Looped(relay.exchange, relay.call, relay, axes)


def test_no_examples_are_refused(relay_of):
    with pytest.raises(polybridge.UnsupportedTensorError, match="a batch of no examples"):
        looped(relay_of(lambda x: x), [0])(arrays(X[:0]))


def sometimes(x, w):
    """Return what depends on w where x is positive only."""
    return x * w if (x.value > 0).all() else x * 2


def test_an_example_without_influence_adds_zeros(relay_of):
    xs = arrays(X * [[1], [-1], [1]], W)
    _, back = looped(relay_of(sometimes, 2), [0, None]).vjp(xs, [0, 1])
    dx, dw = numbers(back([*xs, toy.array(CT)]))
    np.testing.assert_allclose(dx, CT * [W, [2, 2], W])
    np.testing.assert_allclose(dw, (X * CT)[[0, 2]].sum(0))


def test_examples_with_different_influences_have_no_second_derivative(relay_of):
    xs = arrays(X * [[1], [-1], [1]], W)
    _, back = looped(relay_of(sometimes, 2), [0, None]).vjp(xs, [0, 1])
    with pytest.raises(polybridge.NotDifferentiableError, match="does not depend on the same inputs"):
        back.vjp([*xs, toy.array(CT)], [0, 1, 2])


def test_one_evaluation_is_pulled_back_for_each_of_a_batch_of_cotangents(relay_of):
    """The rows of the identity give the Jacobian of x**2, along whichever axis they lie."""
    x = toy.array(W)
    _, back = relay_of(lambda x: x**2).vjp([x], [0])
    for axis in (0, 1):
        rows = Looped(back.exchange, "f", back, [None, axis])
        (found,) = numbers(rows([x, toy.array(np.eye(2))]))
        np.testing.assert_allclose(found, np.diag(2 * W))
