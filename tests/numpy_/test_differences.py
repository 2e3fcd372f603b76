"""Asks how exact finite differences are, what they cost, and what they are of complex functions."""

import ml_dtypes
import numpy as np
import pytest

import polybridge
from tests.pairs.dialects import dialect, np_dtype

X = np.array([-0.7, 0.0, 0.3, 1.5])


def differences(fn):
    return polybridge.wrap(fn, src="numpy", dst="numpy", vjp="finite-difference")


def pulled(fn, x, ct=None):
    y, pullback = differences(fn).vjp(x)
    return pullback(np.ones_like(y) if ct is None else ct)[0]


# The errors that docs/numpy.md promises.
FIRST = {"float16": 2e-2, "bfloat16": 7e-2, "float32": 2e-4, "float64": 1e-9, "complex64": 2e-4, "complex128": 1e-9}
SECOND = {"float32": 1e-2, "float64": 1e-6}


@pytest.mark.parametrize("dtype, error", FIRST.items(), ids=FIRST)
def test_the_first_derivative_of_the_sine(dtype, error):
    x = X.astype(np_dtype(dtype))
    found = pulled(np.sin, x)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype("complex128"), np.cos(x.astype("complex128")), atol=error)


@pytest.mark.parametrize("dtype, error", SECOND.items(), ids=SECOND)
def test_the_second_derivative_of_the_sine(dtype, error):
    x = X.astype(dtype)
    found = differences(lambda x: np.sum(np.sin(x))).hessian(x)
    np.testing.assert_allclose(found, np.diag(-np.sin(X)), atol=error)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_second_derivative_in_half_precision_is_refused(dtype):
    f = differences(lambda x: np.sum(x, dtype=x.dtype))
    with pytest.raises(polybridge.NotDifferentiableError, match="twice in half precision"):
        f.hessian(X.astype(np_dtype(dtype)))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_the_step_grows_with_the_number(scale):
    x = X * scale
    np.testing.assert_allclose(pulled(lambda x: x * x / scale, x), 2 * x / scale, rtol=1e-6, atol=1e-6)


def test_a_pullback_costs_two_runs_for_each_number():
    calls = []
    _, pullback = differences(lambda x, n: calls.append(1) or np.sin(x) * n).vjp(X, 2)
    assert len(calls) == 1
    pullback(X)
    assert len(calls) == 1 + 2 * X.size


def test_only_what_is_wanted_is_moved():
    calls = []
    differences(lambda a, b: calls.append(1) or np.sum(a * b)).grad(np.ones(2), np.ones((4, 2)))
    assert len(calls) == 1 + 2 * 2


def test_a_complex_number_costs_four_runs():
    calls = []
    _, pullback = differences(lambda z: calls.append(1) or z * z).vjp(np.array(1 + 2j))
    pullback(1.0)
    assert len(calls) == 1 + 4


def test_a_holomorphic_function_pulls_back_by_the_conjugate():
    z, ct = np.array([0.3 + 0.4j, -1 + 2j]), np.array([1 - 2j, 0.5j])
    found = pulled(lambda z: np.sin(z) * z, z, ct)
    np.testing.assert_allclose(found, np.conj(np.cos(z) * z + np.sin(z)) * ct, rtol=1e-8)


@pytest.mark.parametrize("name", ["abs", "real", "imag", "conj"])
def test_functions_that_are_not_holomorphic_have_the_gradient_of_the_other_framework(other, name):
    z = np.array([0.3 + 0.4j, -1 + 2j])
    found = differences(getattr(np, name)).vjp(z)[1]
    y = getattr(np, name)(z)
    ct = np.array([1.5, -2.0]).astype(y.dtype) * (1 + 1j if y.dtype.kind == "c" else 1)
    _, (expected,) = other.vjp(getattr(other, name), [other.tensor(z)], [ct])
    np.testing.assert_allclose(found(ct)[0], other.numpy(expected), rtol=1e-8)


def test_a_complex_function_of_a_real_number():
    x, ct = np.array([0.3, 1.2]), np.array([1 - 2j, 0.5j])
    found = pulled(lambda x: np.exp(1j * x), x, ct)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.real(np.conj(1j * np.exp(1j * x)) * ct), rtol=1e-8)


def test_the_second_derivative_of_a_complex_function():
    """In TensorFlow the second pullback of z**3 at z by the first's ones is conj(6 z)."""
    tf = dialect("tensorflow")
    f = polybridge.wrap(lambda z: z**3, src="numpy", dst="tensorflow", vjp="finite-difference")
    second, native = (tf.derivative(tf.derivative(fn)) for fn in (f, lambda z: z**3))
    z = tf.tensor(np.array([0.3 + 0.4j, -1 + 2j]))
    np.testing.assert_allclose(second(z), native(z), rtol=1e-6)


def test_integers_stay_and_are_not_differentiated():
    f = differences(lambda x, n: (x * n, n + 1))
    (_, m), pullback = f.vjp(X, np.array(3))
    by_x, by_n = pullback((np.ones(4), None))
    np.testing.assert_allclose(by_x, [3.0] * 4, rtol=1e-9)
    assert by_n is None and m == 4


def test_a_function_may_write_to_its_arguments():
    def double(x, w):
        x *= w
        w += 100
        return x

    np.testing.assert_allclose(differences(double).vjp(X, 2.0 + 0 * X)[1](np.ones(4))[0], [2.0] * 4, rtol=1e-9)


def test_a_result_that_changes_its_shape_near_by_is_refused():
    _, pullback = differences(lambda x: x[x > 0]).vjp(np.array([0.0, 1.0]))
    with pytest.raises(
        polybridge.OutputError, match=r"float64\[2\] right beside inputs where it returned float64\[1\]"
    ):
        pullback(np.ones(1))


def test_no_numbers_need_no_runs():
    assert pulled(lambda x: x * 2, np.zeros((0, 3))).shape == (0, 3)


def test_bfloat16_is_evaluated_in_bfloat16():
    seen = set()
    pulled(lambda x: seen.add(x.dtype) or x * 2, X.astype(ml_dtypes.bfloat16))
    assert seen == {np.dtype(ml_dtypes.bfloat16)}
