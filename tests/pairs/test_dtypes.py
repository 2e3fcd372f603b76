"""Asks that no dtype changes on the way, and that each kind of number has the derivative that it has natively."""

import numpy as np
import pytest

from tests.pairs.dialects import COMPLEX, FLOATING, INTEGER, assert_identical, np_dtype, sample

SHAPES = [(), (0,), (3,), (1,), (2, 0, 3), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, *INTEGER])
def test_dtype_survives_both_ways(pair, dtype, shape):
    x = sample(shape, dtype)
    found = pair.wrap(pair.src.identity)(pair.dst.tensor(x))
    assert_identical(pair.dst.numpy(found), x)


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, *INTEGER])
def test_function_sees_the_dtype_of_the_caller(pair, src, dst, dtype):
    seen = []
    pair.wrap(lambda x: seen.append(src.dtype(x)))(dst.tensor(sample((3,), dtype)))
    assert seen == [dtype]


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX])
def test_gradient_is_native_and_of_the_dtype_of_the_input(pair, dtype):
    a, b = pair.dst.tensor(sample((3, 4), dtype, 1)), pair.dst.tensor(sample((3, 4), dtype, 2))
    pair.assert_native(lambda a, b: a * b + a, a, b)


@pytest.mark.parametrize("dtype", [name for name in INTEGER if name not in ("bool", "uint16", "uint32", "uint64")])
def test_integer_arithmetic_is_native(pair, dtype):
    pair.assert_native(lambda x: x * x + x, pair.dst.tensor(sample((3, 4), dtype)))


def test_bool_arithmetic_is_native(pair):
    pair.assert_native(lambda a, b: a & (a | b), *(pair.dst.tensor(sample((9,), "bool", seed)) for seed in (1, 2)))


@pytest.mark.parametrize("dtype", [name for name in INTEGER if name != "bool"])
def test_extreme_integers_cross_unchanged(pair, dtype):
    info = np.iinfo(dtype)
    x = np.array([info.min, info.max, 0, 1], dtype)
    assert_identical(pair.dst.numpy(pair.wrap(pair.src.identity)(pair.dst.tensor(x))), x)


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX])
def test_extreme_floats_cross_unchanged(pair, dtype):
    bits = np.random.default_rng(0).integers(0, 256, 64 * np_dtype(dtype).itemsize).astype("uint8")
    x = bits.view(np_dtype(dtype))
    assert_identical(pair.dst.numpy(pair.wrap(pair.src.identity)(pair.dst.tensor(x))), x)


@pytest.mark.parametrize("to", FLOATING)
def test_gradient_through_a_cast_has_the_dtype_of_the_input(pair, src, dst, to):
    pair.assert_native(lambda x: src.cast(src.cast(x, to) * 3, "float32"), dst.tensor(sample((5,))))


def test_inputs_of_different_dtypes_keep_their_own(pair, src, dst):
    xs = [dst.tensor(sample((3,), dtype)) for dtype in ("float32", "float64", "int32", "complex64")]
    pair.assert_native(lambda a, b, n, z: (a * 2, b * 2, n * 2, z * 2), *xs)


def test_complex_to_complex_has_the_native_gradient(pair, src):
    pair.assert_native(lambda z: z * z * src.conj(z), pair.dst.tensor(sample((5,), "complex128")))


def test_real_to_complex_to_real_has_the_native_gradient(pair, src, dst):
    a, b = (dst.tensor(sample((5,), "float64", seed)) for seed in (1, 2))

    def fn(a, b):
        z = src.complex(a, b)
        return src.real(z * z) * src.imag(z * z * z)

    pair.assert_native(fn, a, b)


def test_real_to_complex_has_the_native_gradient(pair, src, dst):
    pair.assert_native(lambda a: src.complex(a, a * 2) * src.complex(a, -a), dst.tensor(sample((5,), "float64")))


def test_complex_to_real_has_the_native_gradient(pair, src, dst):
    pair.assert_native(lambda z: (src.real(z * z), src.abs(z)), dst.tensor(sample((5,), "complex128")))


def test_complex_gradient_follows_the_convention_of_the_caller(pair, src, dst):
    """Case 7: L = |y|^2 with y = z^2 (2 + i) at 1 + 2i."""

    def loss(z):
        y = wrapped(z)
        return dst.square(dst.real(y)) + dst.square(dst.imag(y))

    wrapped = pair.wrap(lambda z: z * z * (2 + 1j))
    z = dst.tensor(np.array(1 + 2j, "complex128"))
    _, (gradient,) = dst.vjp(loss, [z], [np.array(1.0)])
    assert dst.numpy(gradient) == 100 + 200j


def test_holomorphic_gradient_is_the_same_wrapped_and_native(pair, src, dst):
    x = sample((4,), "complex128")

    def loss(m):
        return lambda f: lambda z: m.sum(m.real(f(z) * (1 - 2j)))

    _, (found,) = dst.vjp(loss(dst)(pair.wrap(lambda z: z * z * z)), [dst.tensor(x)], [np.array(1.0)])
    _, (native,) = dst.vjp(loss(dst)(lambda z: z * z * z), [dst.tensor(x)], [np.array(1.0)])
    np.testing.assert_allclose(dst.numpy(found), dst.numpy(native), rtol=1e-14)


def test_zero_dimensional_tensors_stay_zero_dimensional(pair, src, dst):
    """Case 12."""
    x = dst.tensor(2.0)
    pair.assert_native(lambda x: x * 3.0, x)
    assert dst.gradient(pair.wrap(lambda x: x * 3.0), x).shape == ()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 0)], ids=str)
def test_empty_tensors_have_empty_gradients(pair, src, dst, shape):
    pair.assert_native(lambda x: (src.sin(x), src.sum(x)), dst.tensor(np.empty(shape, "float32")))
