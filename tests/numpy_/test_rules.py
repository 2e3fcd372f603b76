"""Asks that `vjp=(fwd, bwd)` and `jvp=` replace the derivative of a function of any framework."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import torch
import toy

import polybridge
from polybridge.core.rules import Rule, RuledFunction
from polybridge.core.trees import separate
from polybridge.core.wrapping import classifier
from tests.numpy_.native_rules import RULES
from tests.pairs.dialects import Pair, dialect

X = np.array([0.3, -0.7, 1.6])
PAIRS = list(itertools.product(RULES, repeat=2))


@pytest.fixture(params=PAIRS, ids="->".join)
def pair(request):
    """Every pair of frameworks, of one with itself too."""
    return Pair(*map(dialect, request.param))


def orders(m, fn, x):
    """Return the first and second derivative of sum(fn(x)**3 * x)."""
    first = m.derivative(lambda x: fn(x) ** 3 * x)
    return m.numpy(first(x)), m.numpy(m.derivative(first)(x))


@pytest.mark.parametrize("name", ["clipped", "straight_through", "scaled"])
def test_a_rule_has_the_derivatives_of_the_native_custom_function(pair, name):
    fn, vjp, native = RULES[pair.src.name][name]
    if pair.src.name == "jax":  # whose own rules end where their `fwd` begins: that is differentiated as it is
        expected = orders(dialect("torch"), RULES["torch"][name].native, torch.tensor(X))
    else:
        expected = orders(pair.src, native, pair.src.tensor(X))
    found = orders(pair.dst, pair.wrap(fn, vjp=vjp), pair.dst.tensor(X))
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["clipped", "straight_through", "scaled"])
def test_a_rule_has_them_in_a_tf_function(name):
    fn, vjp, _ = RULES["torch"][name]
    native = RULES["tensorflow"][name].native
    expected = orders(dialect("tensorflow"), native, tf.constant(X))
    wrapped, derivative = polybridge.wrap(fn, src="torch", dst="tf", vjp=vjp), dialect("tensorflow").derivative
    first = derivative(lambda x: wrapped(x) ** 3 * x)
    found = [tf.function(f, autograph=False)(tf.constant(X)) for f in (first, derivative(first))]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_a_rule_has_them_in_a_tf1_graph():
    fn, vjp, _ = RULES["torch"]["scaled"]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float64, [None])
        first = tf.gradients(polybridge.wrap(fn, src="torch", dst="tf", vjp=vjp)(x), x)[0]
        found = session.run([first, *tf.gradients(first, x)], {x: X})
    np.testing.assert_allclose(found, [2 * X / 3, np.full(3, 2 / 3)], rtol=1e-14)


def test_the_residuals_carry_the_second_derivative_and_the_third(pair):
    """Of a cube whose derivative is said to be the cosine: cos, -sin, -cos."""
    m = pair.src
    f = pair.wrap(lambda x: x**3, vjp=(lambda x: (x**3, {"cos": m.cos(x)}), lambda r, ct: (ct * r["cos"],)))
    for expected in (np.cos(X), -np.sin(X), -np.cos(X)):
        f = pair.dst.derivative(f)
        np.testing.assert_allclose(pair.dst.numpy(f(pair.dst.tensor(X))), expected, rtol=1e-14)


def test_numpy_differentiates_by_the_rule(other):
    f = polybridge.wrap(
        lambda x: other.sum(x**3), src=other.name, dst="numpy",
        vjp=(lambda x: (other.sum(x**3), other.cos(x)), lambda r, ct: (ct * r,)),
    )  # fmt: skip
    np.testing.assert_allclose(f.grad(X), np.cos(X), rtol=1e-14)
    np.testing.assert_allclose(f.hessian(X), np.diag(-np.sin(X)), rtol=1e-14)
    np.testing.assert_allclose(f.jvp((X,), (np.ones(3),))[1], np.cos(X).sum(), rtol=1e-14)


def test_numpy_differentiates_its_own_functions_by_a_rule():
    f = polybridge.wrap(np.sum, src="np", dst="np", vjp=(lambda x: (np.sum(x), x), lambda x, ct: (ct * np.cos(x),)))
    np.testing.assert_allclose(f.grad(X), np.cos(X), rtol=1e-14)


def test_a_rule_may_be_given_by_a_decorator():
    @polybridge.wrap(src="numpy", dst="torch", vjp=(lambda x: (x * 2, None), lambda _, ct: (ct * 5,)))
    def f(x):
        return x * 2

    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(f(x).sum(), x)[0].tolist() == [5.0, 5.0]


def test_finite_differences_serve_any_source(pair):
    m = pair.src
    f = pair.wrap(lambda x: m.sin(m.stop_gradient(x)), vjp="finite-difference")
    np.testing.assert_allclose(pair.dst.gradient(f, pair.dst.tensor(X)), np.cos(X), rtol=1e-8)


# When what runs.


@pytest.fixture
def seen(pair):
    """A function with a rule, and the names of what ran."""
    calls = []

    def named(name, result):
        calls.append(name)
        return result

    vjp = (lambda x: named("fwd", (x * 2, x)), lambda x, ct: named("bwd", (ct * 2,)))
    return pair.wrap(lambda x: named("fn", x * 2), vjp=vjp), calls


def test_only_the_function_runs_where_no_derivative_is_wanted(pair, seen):
    f, calls = seen
    f(pair.dst.tensor(X))
    assert calls == ["fn"]


def test_the_rule_runs_once_for_value_and_gradient(pair, seen):
    f, calls = seen
    if pair.dst.traces:
        pair.dst.gradient(f, pair.dst.tensor(X))
        calls.clear()
    pair.dst.gradient(f, pair.dst.tensor(X))
    assert calls == ["fwd", "bwd"]


def in_place(residuals, ct):
    """Pull back through x**2, writing to what `fwd` has kept, as code for one backward does."""
    (x,) = residuals
    x *= 2 * ct
    return (x,)


WRITING = {"vjp": (lambda x: (x**2, [x]), in_place)}


@pytest.mark.parametrize("src", ["torch", "numpy"])
def test_a_backward_that_writes_to_its_residuals_writes_to_no_input_and_is_right_again(src, other):
    f, x = polybridge.wrap(lambda x: x**2, src=src, dst=other.name, **WRITING), other.tensor(X)
    for _ in range(3):  # the function is trusted from the second call on
        gradient = other.derivative(f)(x)
        np.testing.assert_array_equal(other.numpy(gradient), 2 * X)
        np.testing.assert_array_equal(other.numpy(x), X)


@pytest.mark.parametrize("src", ["torch", "numpy"])
def test_a_backward_that_writes_to_its_residuals_gives_every_row_of_a_jacobian(src):
    f = polybridge.wrap(lambda x: x**2, src=src, dst="numpy", **WRITING)
    _, pullback = f.vjp(X)
    rows = [pullback(row)[0] for row in np.eye(3)]
    np.testing.assert_array_equal(rows, np.diag(2 * X))


@pytest.mark.parametrize("src", ["torch", "numpy"])
def test_a_backward_that_begins_to_write_to_its_residuals_is_an_error(src):
    writes = []

    def bwd(residuals, ct):
        return in_place(residuals, ct) if writes else (2 * residuals[0] * ct,)

    f = polybridge.wrap(lambda x: x**2, src=src, dst="numpy", vjp=(WRITING["vjp"][0], bwd))
    for _ in range(2):
        np.testing.assert_array_equal(f.vjp(X)[1](np.ones(3))[0], 2 * X)
    writes.append(True)
    with pytest.raises((polybridge.MutationError, ValueError), match=r"residuals|read-only"):
        f.vjp(X)[1](np.ones(3))


def test_a_backward_that_does_not_write_is_given_the_residuals_themselves():
    given = []

    def bwd(residuals, ct):
        given.append(residuals)
        return (2 * residuals * ct,)

    f = polybridge.wrap(lambda x: x**2, src="numpy", dst="numpy", vjp=(lambda x: (x**2, x), bwd))
    _, pullback = f.vjp(X)
    rows = [pullback(row)[0] for row in np.eye(3)]
    np.testing.assert_array_equal(rows, np.diag(2 * X))
    assert not np.shares_memory(given[0], given[1]) and np.shares_memory(given[1], given[2])


@pytest.mark.parametrize("kept", [lambda memory: memory, lambda memory: memory[:], lambda memory: memory[1:-1][1:-1]])
def test_residuals_in_memory_that_every_forward_writes_to(kept):
    """In all of it, or in a view."""
    memory = np.empty(3 if kept(np.empty(3)).size else 7)

    def fwd(x):
        return np.sin(x), np.cos(x, out=kept(memory))

    f = polybridge.wrap(np.sin, src="numpy", dst="numpy", vjp=(fwd, lambda r, ct: (r * ct,)))
    points = [X, 2 * X, 3 * X, 4 * X]
    pullbacks = [f.vjp(x)[1] for x in points]
    for pullback, x in zip(pullbacks, points, strict=True):
        np.testing.assert_array_equal(pullback(np.ones(3))[0], np.cos(x))


def test_residuals_that_the_forward_lets_go_of_are_not_copied():
    returned, given = [], []

    def fwd(x):
        cos = np.cos(x)
        returned.append(cos.ctypes.data)
        return np.sin(x), cos

    def bwd(residuals, ct):
        given.append(residuals.ctypes.data)
        return (residuals * ct,)

    f = polybridge.wrap(np.sin, src="numpy", dst="numpy", vjp=(fwd, bwd))
    for x in (X, 2 * X, 3 * X):
        np.testing.assert_array_equal(f.vjp(x)[1](np.ones(3))[0], np.cos(x))
    assert [a == b for a, b in zip(returned, given, strict=True)] == [False, True, True]


def test_residuals_in_memory_that_the_next_forward_writes_to_are_those_of_their_own():
    cos = np.empty(3)
    rule = (lambda x: (np.sin(x), np.cos(x, out=cos)), lambda r, ct: (r * ct,))
    f = polybridge.wrap(np.sin, src="numpy", dst="numpy", vjp=rule)
    pullbacks = [f.vjp(x)[1] for x in (X, 2 * X)]
    for pullback, x in zip(pullbacks, (X, 2 * X), strict=True):
        np.testing.assert_array_equal(pullback(np.ones(3))[0], np.cos(x))


def test_such_residuals_of_torch_are_an_error():
    cos = torch.empty(3, dtype=torch.float64)
    rule = (lambda x: (x.sin(), torch.cos(x, out=cos)), lambda r, ct: (r * ct,))
    f = polybridge.wrap(torch.sin, src="torch", dst="numpy", vjp=rule)
    pullbacks = [f.vjp(x)[1] for x in (X, 2 * X)]
    np.testing.assert_array_equal(pullbacks[1](np.ones(3))[0], np.cos(2 * X))
    with pytest.raises(polybridge.MutationError, match="had returned as residuals"):
        pullbacks[0](np.ones(3))


def test_residuals_that_cannot_be_copied_are_kept_as_they_are():
    def fwd(x):
        return x**2, {"x": x, "names": np.array(["a"]), "objects": np.array([f]), "step": np.int64(3)}

    def bwd(residuals, ct):
        assert residuals["names"][0] == "a" and residuals["objects"][0] is f and type(residuals["step"]) is np.int64
        return (2 * residuals["x"] * ct,)

    f = polybridge.wrap(lambda x: x**2, src="numpy", dst="numpy", vjp=(fwd, bwd))
    np.testing.assert_array_equal(f.vjp(X)[1](np.ones(3))[0], 2 * X)


def test_a_random_rule_is_not_differentiated_twice(pair):
    """The second derivative runs fwd again, which would draw another mask. JAX takes its functions to be pure."""
    if pair.src.traces:
        return
    masks = itertools.cycle([2.0, 30.0, 400.0])

    def fwd(x):
        mask = next(masks)
        return x * mask, mask

    f = pair.wrap(lambda x: x, vjp=(fwd, lambda mask, ct: (ct * mask,)))
    with pytest.raises(polybridge.NotDifferentiableError, match="other values when it was run again"):
        pair.dst.derivative(pair.dst.derivative(f))(pair.dst.tensor(X))


# Trees.


def assert_absent(dst, gradient):
    """Assert that there is no gradient, by the convention of the caller."""
    assert gradient is None if dst.name != "jax" else not gradient.any()


def test_cotangents_are_trees_like_the_result_and_the_arguments(pair):
    given = []

    def fwd(p, n):
        return {"a": p["x"] * n, "b": [pair.src.zeros_like(p["x"]), "text"], "c": pair.src.tensor([7])}, None

    def bwd(_, ct):
        given.append(ct)
        return {"x": ct["a"] * 10, "y": None}, None

    f = pair.wrap(lambda p, n: fwd(p, n)[0], vjp=(fwd, bwd))
    xs = [pair.dst.tensor(X), pair.dst.tensor(X)]
    _, (by_x, by_y) = pair.dst.vjp(lambda x, y: f({"x": x, "y": y}, 2)["a"], xs, [np.ones(3)])
    np.testing.assert_array_equal(pair.dst.numpy(by_x), [10.0] * 3)
    assert_absent(pair.dst, by_y)
    ct = given[-1]
    assert ct["b"][1] is None and ct["c"] is None
    np.testing.assert_array_equal(pair.src.numpy(ct["a"]), [1.0] * 3)
    np.testing.assert_array_equal(pair.src.numpy(ct["b"][0]), [0.0] * 3)


def test_none_in_place_of_an_argument_says_that_it_has_no_influence(pair):
    f = pair.wrap(lambda p, x: x * 1, vjp=(lambda p, x: (x * 1, None), lambda _, ct: (None, ct * 4)))
    xs = [pair.dst.tensor(X), pair.dst.tensor(X)]
    _, (by_p, by_x) = pair.dst.vjp(lambda p, x: f({"p": [p]}, x), xs, [np.ones(3)])
    assert_absent(pair.dst, by_p)
    np.testing.assert_array_equal(pair.dst.numpy(by_x), [4.0] * 3)


def test_cotangents_of_keyword_arguments_are_a_dict(pair):
    vjp = (lambda x, *, w, n: (x * w, None), lambda _, ct: (ct * 2, {"w": ct * 3, "n": None}))
    f = pair.wrap(lambda x, *, w, n: x * w, vjp=vjp)
    xs = [pair.dst.tensor(X), pair.dst.tensor(X)]
    _, found = pair.dst.vjp(lambda x, w: f(x, n=1, w=w), xs, [np.ones(3)])
    np.testing.assert_array_equal([pair.dst.numpy(g) for g in found], [[2.0] * 3, [3.0] * 3])


def test_keyword_arguments_without_tensors_need_no_cotangent(pair):
    f = pair.wrap(lambda x, scale: x, vjp=(lambda x, scale: (x * scale, scale), lambda scale, ct: (ct * scale,)))
    assert pair.dst.gradient(lambda x: f(x, scale=2.0), pair.dst.tensor(X)).tolist() == [2.0] * 3


# What a rule may get wrong.


def wrong(m):
    """Return what a rule may return, and how the message describes it."""
    return {
        "fwd_returns_no_pair": (lambda p, y: y, None, "`fwd` returned a .*, not \\(out, residuals\\)"),
        "no_tuple": (None, lambda ct: ct, "`bwd` returned a .*, not a tuple of cotangents"),
        "length": (None, lambda ct: (ct,), "`bwd` returned 1 cotangents, not one for each of 2 positional arguments"),
        "tree": (None, lambda ct: ([ct], ct), r"`bwd` returned no tree like the arguments"),
        "kind": (
            None,
            lambda ct: ({"x": 1.0}, ct),
            r"`bwd` returned for args\[0\]\['x'\] a value of type float, not a .* tensor",
        ),
        "shape": (None, lambda ct: ({"x": ct[:2]}, ct), r"args\[0\]\['x'\] float64\[2\] instead of float64\[3\]"),
        "dtype": (
            None,
            lambda ct: ({"x": ct}, m.cast(ct, "float32")),
            r"args\[1\] float32\[3\] instead of float64\[3\]",
        ),
    }


@pytest.mark.parametrize("name", wrong(None))
def test_what_a_rule_returns_is_checked_by_its_path(pair, name):
    fwd, bwd, message = wrong(pair.src)[name]
    vjp = (fwd or (lambda p, y: (p["x"] * y, None)), lambda _, ct: bwd(ct))
    f = pair.wrap(lambda p, y: p["x"] * y, vjp=vjp)
    with pytest.raises(polybridge.OutputError, match=message):
        pair.dst.gradient(lambda x: f({"x": x}, x), pair.dst.tensor(X))


def test_keyword_tensors_without_a_cotangent_are_refused(pair):
    f = pair.wrap(lambda x, w: x * w, vjp=(lambda x, w: (x * w, None), lambda _, ct: (ct,)))
    with pytest.raises(
        polybridge.OutputError, match="1 cotangents, not one for each of 1 positional arguments and a dict"
    ):
        pair.dst.gradient(lambda x: f(x, w=x), pair.dst.tensor(X))


@pytest.mark.parametrize(
    "vjp",
    ["finite_difference", np.sin, (np.sin,), (np.sin, None), (np.sin,) * 3, 1],
    ids=["name", "fn", "1", "None", "3", "int"],
)
def test_another_vjp_is_refused_when_wrapping(vjp):
    with pytest.raises(ValueError, match=r'takes vjp=\(fwd, bwd\), a pair of callables, or vjp="finite-difference"'):
        polybridge.wrap(np.sin, src="numpy", dst="torch", vjp=vjp)


def test_another_jvp_is_refused_when_wrapping():
    with pytest.raises(ValueError, match="takes a callable as jvp=, got 3"):
        polybridge.wrap(np.sin, src="numpy", dst="torch", jvp=3)


# Forward mode.


def ruled(rule, fn, *xs):
    """Return the pullback of a function of toy under a rule."""
    source = polybridge.get_backend("toy")
    leaves, structure = separate((xs, {}), classifier(source), None)
    program = RuledFunction(rule, fn, "f", source, structure, classifier(source))
    evaluator = program.evaluator(lambda fn, inputs: fn(inputs), lambda fn, inputs: fn(inputs))
    return evaluator.vjp(leaves, range(len(leaves)))[1]


def forward(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return (x * w, x), (dx * w * 10.0 + dw * x, None)


def test_a_forward_rule_pushes_tangents():
    pullback = ruled(Rule(jvp=forward), lambda x, w: (x * w, x), toy.array(2.0), toy.array(3.0))
    tangents = pullback.jvp([toy.array(1.0), toy.array(100.0)])
    assert [None if t is None else t.value.item() for t in tangents] == [230.0, None]


def test_a_forward_rule_gets_zeros_for_absent_tangents():
    pullback = ruled(Rule(jvp=forward), lambda x, w: (x * w, x), toy.array(2.0), toy.array(3.0))
    assert pullback.jvp([None, toy.array(1.0)])[0].value == 2.0


def test_a_forward_rule_is_checked_by_its_path():
    careless = Rule(jvp=lambda primals, tangents: ((primals[0], primals[1]), (tangents[0], 1.0)))
    pullback = ruled(careless, lambda x, w: (x, w), toy.array(2.0), toy.array(3.0))
    with pytest.raises(
        polybridge.OutputError, match=r"`jvp` returned for result\[1\] a value of type float, not a toy tensor"
    ):
        pullback.jvp([None, None])


def test_finite_differences_push_tangents_in_two_runs():
    calls = []
    pullback = ruled(Rule(differences=True), lambda x: calls.append(1) or toy.sin(x), toy.array(X))
    calls.clear()
    (tangent,) = pullback.jvp([toy.array([1.0, 0.0, 2.0])])
    np.testing.assert_allclose(tangent.value, np.cos(X) * [1, 0, 2], rtol=1e-9)
    assert len(calls) == 2


def test_a_forward_rule_alone_has_no_gradient(other):
    f = polybridge.wrap(np.sin, src="numpy", dst=other.name, jvp=lambda primals, tangents: (primals, tangents))
    with pytest.raises(polybridge.NotDifferentiableError, match="`jvp=` alone, which gives no cotangents"):
        other.gradient(f, other.tensor([1.0]))
