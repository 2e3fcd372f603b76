"""Asks that functions of the other frameworks are functions of arrays, with their derivatives as methods."""

import threading

import numpy as np
import pytest
import scipy.optimize
import torch

import polybridge
from tests.pairs.dialects import COMPLEX, FLOATING, INTEGER, assert_identical, sample

X = np.array([0.5, 1.5])


def in_numpy(other, fn, **options):
    return polybridge.wrap(fn, src=other.name, dst="numpy", **options)


def wave(other):
    """Of x: sin(x) * x, summed."""
    return in_numpy(other, lambda x: other.sum(other.sin(x) * x))


def wave_slope(x):
    return np.cos(x) * x + np.sin(x)


def rosenbrock(other):
    return in_numpy(other, lambda x: other.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2))


def test_values_are_arrays(other):
    y = in_numpy(other, other.sin)(X)
    assert type(y) is np.ndarray
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-15)


def test_a_single_number_is_an_array_of_no_dimensions(other):
    y = wave(other)(X)
    assert type(y) is np.ndarray and y.shape == ()


def test_a_numpy_scalar_is_a_tensor(other):
    seen = []
    y = in_numpy(other, lambda x: (seen.append(x), x * 2)[1])(np.float32(1.5))
    assert other.is_tensor(seen[0])
    assert_identical(y, np.array(3, "float32"))


@pytest.mark.parametrize("shape", [(), (0,), (1, 3, 1), (2, 0, 3), (4,)], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, *INTEGER])
def test_every_dtype_and_shape_survives(other, dtype, shape):
    x = sample(shape, dtype)
    assert_identical(in_numpy(other, other.identity)(x), x)


def test_value_and_gradient(other):
    value, gradient = wave(other).value_and_grad(X)
    np.testing.assert_allclose(value, np.sum(np.sin(X) * X), rtol=1e-15)
    np.testing.assert_allclose(gradient, wave_slope(X), rtol=1e-15)


def test_the_gradient_alone(other):
    np.testing.assert_allclose(wave(other).grad(X), wave_slope(X), rtol=1e-15)


def test_the_gradient_in_one_argument_of_several(other):
    f = in_numpy(other, lambda a, b: other.sum(a * b**2))
    np.testing.assert_allclose(f.grad(X, 2 * X, argnums=1), 4 * X**2)


def test_the_gradient_in_several_arguments_is_a_tuple(other):
    f = in_numpy(other, lambda a, b: other.sum(a * b**2))
    by_b, by_a = f.grad(X, 2 * X, argnums=(1, 0))
    np.testing.assert_allclose([by_a, by_b], [4 * X**2, 4 * X**2])


def test_the_gradient_of_a_tree_is_a_tree(other):
    f = in_numpy(other, lambda p, *, scale: other.sum(p["w"][0] * p["n"] * scale))
    gradient = f.grad({"w": [X], "n": np.array(3.0), "name": "p", "index": np.array(1)}, scale=2.0)
    assert gradient["name"] is None and gradient["index"] is None
    np.testing.assert_allclose(gradient["w"][0], [6.0, 6.0])
    np.testing.assert_allclose(gradient["n"], 2 * X.sum())


def test_an_argument_without_influence_has_a_gradient_of_zeros(other):
    gradient = in_numpy(other, lambda a, b: other.sum(a)).grad(X, X, argnums=1)
    assert_identical(gradient, np.zeros(2))


def test_gradients_have_the_dtype_of_the_argument(other):
    assert wave(other).grad(X.astype("float32")).dtype == np.float32


def test_the_gradient_of_several_numbers_is_refused(other):
    with pytest.raises(polybridge.OutputError, match=r"not one real number, but float64\[2\]\. Use `.*\.vjp`"):
        in_numpy(other, other.sin).grad(X)


def test_the_gradient_in_something_without_arrays_is_refused(other):
    with pytest.raises(polybridge.NotDifferentiableError, match=r"args\[1\], which holds no floating or complex array"):
        in_numpy(other, lambda x, n: other.sum(x * n)).grad(X, 2.0, argnums=1)


def test_primals_and_tangents_are_tuples(other):
    """An array would be taken for as many arguments as it has rows."""
    f = in_numpy(other, lambda a, b: a * b)
    for primals, tangents in ((np.ones(2), (np.ones(2), np.ones(2))), ((np.ones(2), np.ones(2)), np.ones(2))):
        with pytest.raises(polybridge.CotangentError, match="of type ndarray, but a tuple with an entry for each"):
            f.jvp(primals, tangents)


@pytest.mark.parametrize("derivative", ["grad", "value_and_grad", "hessian"])
@pytest.mark.parametrize("x", [3.0, [1.0, 2.0], None, "x"], ids=str)
def test_it_is_refused_before_the_function_runs(other, derivative, x):
    def fn(x):
        raise AssertionError("it ran")

    with pytest.raises(polybridge.NotDifferentiableError, match=r"args\[0\], which .*Give `numpy.asarray"):
        getattr(in_numpy(other, fn), derivative)(x)


@pytest.mark.parametrize(
    ("derivative", "argnums"), [("grad", 2), ("value_and_grad", -3), ("grad", (0, 2)), ("hessian", 2)], ids=str
)
def test_an_argument_that_is_not_there(other, derivative, argnums):
    f = in_numpy(other, lambda a, b: other.sum(a * b))
    with pytest.raises(polybridge.NotDifferentiableError, match=r"args\[(2|-3)\].*called with 2 positional arguments"):
        getattr(f, derivative)(X, X, argnums=argnums)


def test_the_number_of_an_argument_may_be_an_integer_of_numpy(other):
    f = in_numpy(other, lambda a, b: other.sum(a * b))
    np.testing.assert_allclose(f.grad(X, 2 * X, argnums=np.int64(1)), X)


def test_the_pullback(other):
    y, pullback = in_numpy(other, lambda x: other.sin(x) * x).vjp(X)
    np.testing.assert_allclose(y, np.sin(X) * X, rtol=1e-15)
    for ct in (np.array([1.0, 10.0]), np.array([0.0, -2.0])):
        np.testing.assert_allclose(pullback(ct)[0], ct * wave_slope(X), rtol=1e-15)


def test_the_pullback_takes_and_gives_trees(other):
    f = in_numpy(other, lambda p, n: {"a": p["x"] * 2, "b": [p["x"] * n, "text"]})
    _, pullback = f.vjp({"x": X}, 3.0)
    by_p, by_n = pullback({"a": None, "b": [np.ones(2), None]})
    np.testing.assert_allclose(by_p["x"], [3.0, 3.0])
    assert by_n is None


def test_a_python_number_is_the_cotangent_of_a_single_number(other):
    np.testing.assert_allclose(wave(other).vjp(X)[1](2.0)[0], 2 * wave_slope(X), rtol=1e-15)


@pytest.mark.parametrize(
    "ct, found",
    [(np.ones(3), r"float64\[3\]"), (np.ones(2, "float32"), r"float32\[2\]"), (1.0, "a float"), ([1.0, 1.0], "a list")],
    ids=["shape", "dtype", "number", "list"],
)
def test_a_cotangent_that_does_not_fit_is_refused(other, ct, found):
    _, pullback = in_numpy(other, other.sin).vjp(X)
    with pytest.raises(polybridge.CotangentError, match=rf"the cotangent of result is {found}, but float64\[2\]"):
        pullback(ct)


def test_a_cotangent_of_another_tree_is_refused(other):
    _, pullback = in_numpy(other, lambda x: {"y": other.sin(x)}).vjp(X)
    with pytest.raises(polybridge.CotangentError, match="the cotangent is another tree"):
        pullback({"z": X})


def test_the_derivative_along_a_tangent(other):
    f = in_numpy(other, lambda a, b: (other.sin(a) * b, b * 2))
    out, tangents = f.jvp((X, 3 * X), (np.array([1.0, 10.0]), np.array([2.0, 0.0])))
    np.testing.assert_allclose(out[0], np.sin(X) * 3 * X, rtol=1e-15)
    np.testing.assert_allclose(tangents[0], np.cos(X) * 3 * X * [1, 10] + np.sin(X) * [2, 0], rtol=1e-14)
    np.testing.assert_allclose(tangents[1], [4.0, 0.0])


def test_an_absent_tangent_is_zero(other):
    _, tangent = in_numpy(other, lambda a, b: a * b).jvp((X, 3 * X), (np.ones(2), None))
    np.testing.assert_allclose(tangent, 3 * X)


def test_the_derivative_of_what_depends_on_nothing_is_zero(other):
    f = in_numpy(other, lambda x: other.stop_gradient(x) * 2)
    assert_identical(f.jvp((X,), (np.ones(2),))[1], np.zeros(2))


def test_tangents_have_to_be_as_many_as_primals(other):
    with pytest.raises(polybridge.CotangentError, match="the tangents is 2, but 1 is needed"):
        wave(other).jvp((X,), (X, X))


def test_the_hessian(other):
    x = np.array([-0.3, 0.7, 1.1])
    np.testing.assert_allclose(rosenbrock(other).hessian(x), scipy.optimize.rosen_hess(x), rtol=1e-13)


def test_the_hessian_of_a_matrix_has_four_dimensions(other):
    x = sample((2, 3), "float64")
    found = in_numpy(other, lambda x: other.sum(x**3)).hessian(x)
    np.testing.assert_allclose(found.reshape(6, 6), np.diag(6 * x.ravel()), rtol=1e-14, atol=1e-14)


def test_the_hessian_of_a_linear_function_is_zero(other):
    assert_identical(in_numpy(other, lambda x: other.sum(x * 2.0)).hessian(X), np.zeros((2, 2)))


def test_complex_cotangents_follow_the_convention_of_torch_and_tensorflow(other):
    """Of y = z**2 at 1 + 2j with a cotangent of 1: conj(2 z)."""
    _, pullback = in_numpy(other, lambda z: z * z).vjp(np.array(1 + 2j))
    assert pullback(1.0)[0] == 2 - 4j


def test_the_function_runs_once_for_value_and_gradient(other):
    calls = []
    in_numpy(other, lambda x: calls.append(1) or other.sum(x * x)).value_and_grad(X)
    assert calls == [1]


def test_lbfgsb_finds_the_optimum_of_the_rosenbrock_function(other):
    x, options = np.array([1.3, 0.7, 0.8, 1.9, 1.2]), {"ftol": 1e-14, "gtol": 1e-9}
    found = scipy.optimize.minimize(rosenbrock(other).value_and_grad, x, jac=True, method="L-BFGS-B", options=options)
    np.testing.assert_allclose(found.x, np.ones(5), atol=1e-5)


def test_newton_finds_it_with_the_hessian(other):
    f = rosenbrock(other)
    found = scipy.optimize.minimize(f, [-1.2, 1.0], jac=f.grad, hess=f.hessian, method="trust-exact")
    np.testing.assert_allclose(found.x, [1.0, 1.0], atol=1e-7)


def test_a_wrapped_function_may_call_another(other):
    """While the outer one is recorded, the inner one is not."""
    inner = in_numpy(other, lambda x: x * 3)
    seen = []
    outer = in_numpy(other, lambda x: (seen.append(inner(X)), other.sum(x * x))[1])
    np.testing.assert_allclose(outer.grad(X), 2 * X)
    np.testing.assert_allclose(seen[0], 3 * X)


def test_an_exception_leaves_nothing_behind(other):
    f = in_numpy(other, lambda x: other.sum(x * x))
    with pytest.raises(polybridge.WrongFrameworkError):
        f.grad(other.tensor([1.0]))
    np.testing.assert_allclose(f(X), np.sum(X**2))


def test_threads_differentiate_one_function_at_once(other):
    f, found = wave(other), {}

    def differentiate(n):
        found[n] = [f.grad(X + n) for _ in range(10)]

    threads = [threading.Thread(target=differentiate, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, gradients in found.items():
        np.testing.assert_allclose(gradients, [wave_slope(X + n)] * 10, rtol=1e-13)


def test_convert_makes_arrays(other):
    tree = polybridge.convert({"x": other.tensor([1.0, 2.0]), "n": 3}, "numpy")
    assert_identical(tree["x"], np.array([1.0, 2.0], "float32"))
    assert tree["n"] == 3


def test_a_function_of_numpy_in_numpy_is_itself():
    assert polybridge.wrap(np.sin, src="numpy", dst="np") is np.sin


def test_a_tensor_is_refused_by_its_path(other):
    with pytest.raises(polybridge.WrongFrameworkError, match=r'takes numpy tensors, but args\[0\].*convert.*"numpy"'):
        wave(other)(other.tensor([1.0]))


def test_weights_that_the_function_holds_are_told():
    net = torch.nn.Linear(2, 1, dtype=torch.float64)
    with pytest.warns(polybridge.DetachedStateWarning, match="weight") as told:
        polybridge.wrap(lambda x: net(x).sum(), src="torch", dst="numpy").grad(X)
    assert told[0].filename == __file__
