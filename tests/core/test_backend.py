"""Asks the contract's defaults: pullbacks of plain callables, and what a backend of five methods can do."""

import numpy as np
import pytest
import toy
from polybridge_toy.backend import ToyBackend

import polybridge
from polybridge import TensorSpec
from polybridge.core.backend import NoPullback, pullback_of, spread

ONE = toy.array(1.0)


def numbers(arrays):
    """Return what arrays hold, None for what is not there."""
    return [None if x is None else x.value.tolist() for x in arrays]


def power(x):
    return [x**6]


def test_five_methods_and_a_name_make_a_backend():
    assert polybridge.Backend.__abstractmethods__ == {"is_tensor", "to_numpy", "from_numpy", "vjp", "wrap_as_native"}
    given = {name for name in vars(ToyBackend) if callable(getattr(ToyBackend, name)) and not name.startswith("_")}
    assert given == polybridge.Backend.__abstractmethods__


def test_a_missing_method_is_named():
    partial = type("Partial", (ToyBackend,), {"vjp": polybridge.Backend.vjp})
    with pytest.raises(TypeError, match="vjp"):
        partial()


def test_a_plain_callable_becomes_a_pullback(backend, two):
    outputs, pullback = pullback_of(backend, power, [two])
    assert isinstance(pullback, polybridge.Pullback)
    assert numbers(outputs) == [64.0]
    assert numbers(pullback([ONE])) == [192.0]


def test_a_pullback_that_cannot_be_called_is_refused(backend, two):
    careless = type("Careless", (ToyBackend,), {"vjp": lambda self, fn, primals: (fn(*primals), None)})()
    with pytest.raises(polybridge.NotDifferentiableError, match="'toy' returned None as a pullback"):
        pullback_of(careless, power, [two])


def test_a_pullback_of_the_backends_own_is_kept(backend, two):
    own = pullback_of(backend, power, [two])[1]
    generous = type("Generous", (ToyBackend,), {"vjp": lambda self, fn, primals: (fn(*primals), own)})()
    assert pullback_of(generous, power, [two])[1] is own


def test_an_absent_cotangent_counts_as_zero(backend, two):
    _, pullback = pullback_of(backend, lambda x: [x**2, x**3], [two])
    assert numbers(pullback([None, ONE])) == [12.0]
    assert numbers(pullback([None, None])) == [0.0]


def test_an_input_without_influence_has_no_cotangent(backend, two):
    _, pullback = pullback_of(backend, lambda x, w: [x**2], [two, ONE])
    assert numbers(pullback([ONE])) == [4.0, None]


def test_the_pullback_of_a_pullback_goes_on_to_any_order(backend, two):
    """Derivatives of x**6 at 2: 192, 480, 960, 1440, 1440."""
    _, pullback = pullback_of(backend, power, [two])
    cts, found = [ONE], []
    for _ in range(5):
        outputs, pullback = pullback.vjp(cts)
        found.append(outputs[0].value.item())
        cts = [ONE, *[None] * (len(outputs) - 1)]
    assert found == [192.0, 480.0, 960.0, 1440.0, 1440.0]


def test_differentiating_a_pullback_gives_its_value_too(backend, two):
    _, pullback = pullback_of(backend, power, [two])
    assert numbers(pullback.vjp([ONE])[0]) == numbers(pullback([ONE]))


def test_a_pullback_is_linear_in_its_cotangent(backend, two):
    """The cotangent's own cotangent is the derivative: d(ct * 6 x**5)/d(ct)."""
    _, pullback = pullback_of(backend, power, [two])
    _, second = pullback.vjp([ONE])
    assert numbers(second([ONE])) == [480.0, 192.0]


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_slots_stay_in_place_at_every_order_when_an_input_has_no_influence(backend, two, order):
    """The pullback of order n has one result for each primal and for each cotangent of each order below."""
    _, pullback = pullback_of(backend, lambda x, w: [x**6], [two, ONE])
    cts, inputs = [ONE], 2
    for _ in range(order - 1):
        found, pullback = pullback.vjp(cts)
        assert len(found) == inputs
        inputs += len(cts)
        cts = [ONE, *[None] * (len(found) - 1)]
    assert len(pullback(cts)) == inputs


def test_a_cotangent_of_fourth_order_finds_its_own_slot(backend, two):
    """The third pullback of x**6 has, at x, b * a * c * 120 x**3, which is linear in each cotangent a, b, c."""
    _, pullback = pullback_of(backend, lambda x, w: [x**6], [two, ONE])
    for cts in ([ONE], [ONE, None], [ONE, None, None]):
        _, pullback = pullback.vjp(cts)
    x, w, c, a, a_of_w, b, *_ = numbers(pullback([ONE, None, None, None, None]))
    assert (x, w, c, a, a_of_w, b) == (1440.0, None, 960.0, 960.0, None, 960.0)


def test_a_linear_function_has_no_second_derivative_with_respect_to_its_input(backend, two):
    _, pullback = pullback_of(backend, lambda x: [3 * x], [two])
    found, second = pullback.vjp([ONE])
    assert numbers(found) == [3.0]
    assert numbers(second([ONE])) == [None, 3.0]


def test_a_function_without_outputs_has_a_pullback(backend, two):
    outputs, pullback = pullback_of(backend, lambda x: [], [two])
    assert list(outputs) == []
    assert numbers(pullback([])) == [None]


def test_the_default_copy_has_memory_of_its_own(backend):
    x = toy.array([1.0, 2.0])
    assert not np.shares_memory(backend.copy(x).value, x.value)


def test_the_default_spec_is_read_from_the_array(backend):
    assert backend.spec(toy.array(np.zeros((2, 3), np.int8))) == TensorSpec((2, 3), "int8")


def test_default_placeholders_have_the_specs_that_were_asked_for(backend):
    specs = [TensorSpec((2, 3), "bfloat16"), TensorSpec((), "int32")]
    placeholders, running = backend.placeholders(specs)
    with running(), running():
        assert [backend.spec(x) for x in placeholders] == specs


def test_values_are_spread_over_their_positions():
    assert spread(["a", "b"], [1, 3], 4) == [None, "a", None, "b"]


def test_too_few_values_are_not_spread():
    with pytest.raises(ValueError, match="shorter"):
        spread(["a"], [1, 3], 4)


def test_a_pullback_has_no_forward_mode_unless_it_says_so(backend, two):
    _, pullback = pullback_of(backend, power, [two])
    with pytest.raises(NotImplementedError):
        pullback.jvp([ONE])


@pytest.mark.parametrize(
    "ask", [lambda pullback: pullback([ONE]), lambda pullback: pullback.vjp([ONE])], ids=["call", "vjp"]
)
def test_what_has_no_pullback_says_so_each_time_anew(ask):
    error = polybridge.NotDifferentiableError("no way")
    for _ in range(2):
        with pytest.raises(polybridge.NotDifferentiableError, match="no way") as raised:
            ask(NoPullback(error))
        assert raised.value is not error
