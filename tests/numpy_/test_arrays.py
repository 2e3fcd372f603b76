"""Asks that arrays of every layout cross by their values, and that no memory is shared."""

import re

import numpy as np
import pytest
import torch

import polybridge
from polybridge.observe import count_crossings
from tests.pairs.dialects import COMPLEX, FLOATING, INTEGER, assert_identical, sample


def _frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def _unaligned(x):
    buffer = np.zeros(x.nbytes + 1, "uint8")
    unaligned = buffer[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    return unaligned


LAYOUTS = {
    "read_only": _frozen,
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast_scalar": lambda x: np.broadcast_to(np.float32(0.5), (4,)),
    "negative_strides": lambda x: x[::-1, ::-2],
    "transposed": lambda x: x.T,
    "every_second": lambda x: x[::2, 1::3],
    "column": lambda x: x[:, 1],
    "fortran": np.asfortranarray,
    "unaligned": _unaligned,
    "big_endian": lambda x: x.astype(">f4"),
    "element": lambda x: x[1, 2],
    "no_dimensions": lambda x: np.array(0.5, "float32"),
    "empty": lambda x: x[:0],
    "subclass": lambda x: x.view(type("Own", (np.ndarray,), {})),
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x[0], 3),
    "field": lambda x: np.rec.fromarrays([x, x], names="a,b").a,
}
layouts = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


def plain(x):
    """Return the same numbers in a plain array."""
    return np.array(x, np.dtype(x.dtype).newbyteorder("="), order="C")


@layouts
def test_an_array_of_any_layout_crosses_by_its_values(other, make):
    x = make(sample((4, 6)))
    before = plain(x)
    assert_identical(polybridge.wrap(lambda t: t * 2, src=other.name, dst="numpy")(x), before * 2)
    assert_identical(plain(x), before)


@layouts
def test_a_result_of_any_layout_crosses_by_its_values(other, make):
    x = make(sample((4, 6)))
    y = polybridge.wrap(lambda: x, src="numpy", dst=other.name)()
    assert_identical(other.numpy(y), plain(x))


@layouts
def test_the_gradient_at_an_array_of_any_layout(other, make):
    x = make(sample((4, 6)))
    f = polybridge.wrap(lambda t: other.sum(t * t), src=other.name, dst="numpy")
    assert_identical(f.grad(x), 2 * plain(x))


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX, *INTEGER])
def test_a_numpy_function_sees_and_gives_every_dtype(other, dtype):
    x, seen = sample((3,), dtype), []
    y = polybridge.wrap(lambda a: seen.append(a.dtype.name) or a[::-1], src="numpy", dst=other.name)(other.tensor(x))
    assert seen == [dtype]
    assert_identical(other.numpy(y), plain(x[::-1]))


UNSUPPORTED = {
    "object": np.array([1, None]),
    "str": np.array(["text"]),
    "bytes": np.array([b"text"]),
    "datetime64": np.array(["2020-01-01"], "datetime64[D]"),
    "void": np.zeros(2, [("a", "f4")]),
    "longdouble": np.zeros(2, "longdouble"),
}


@pytest.mark.parametrize("x", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_array_that_nobody_holds_is_refused_by_its_path(other, x):
    f = polybridge.wrap(lambda tree: tree, src=other.name, dst="numpy")
    with pytest.raises(
        polybridge.UnsupportedTensorError, match=rf"args\[0\]\['x'\]\[1\] cannot.*{re.escape(x.dtype.name)}"
    ):
        f({"x": [np.ones(1), x]})


@pytest.mark.parametrize("x", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_result_that_nobody_holds_is_refused_by_its_path(other, x):
    f = polybridge.wrap(lambda: {"x": [np.ones(1), x]}, src="numpy", dst=other.name)
    with pytest.raises(
        polybridge.UnsupportedTensorError, match=rf"result\['x'\]\[1\] cannot.*{re.escape(x.dtype.name)}"
    ):
        f()


def test_a_masked_array_is_refused(other):
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\] cannot.*masked"):
        polybridge.wrap(lambda x: x, src=other.name, dst="numpy")(np.ma.masked_array([1.0, 2.0], [True, False]))


# Memory.


def test_a_numpy_function_may_write_to_its_argument(other):
    def double(a):
        a *= 2
        return a

    x, f = other.tensor([1.0, 2.0]), polybridge.wrap(double, src="numpy", dst=other.name)
    for _ in range(4):
        assert other.numpy(f(x)).tolist() == [2.0, 4.0]
    assert other.numpy(x).tolist() == [1.0, 2.0]


def test_what_a_numpy_function_keeps_is_its_own(other):
    kept = []
    f = polybridge.wrap(lambda a: kept.append(a) or a + 1, src="numpy", dst=other.name)
    x = other.tensor([1.0, 2.0])
    ys = [f(x) for _ in range(4)]
    for a in kept:
        a[:] = 99
    assert [other.numpy(t).tolist() for t in (x, *ys)] == [[1.0, 2.0], *[[2.0, 3.0]] * 4]


def test_what_a_numpy_function_keeps_of_its_result_is_its_own(other):
    state = np.zeros(2)

    def step():
        state[:] += 1
        return state

    f = polybridge.wrap(step, src="numpy", dst=other.name)
    assert [other.numpy(y).tolist() for y in [f(), f(), f()]] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_rule_may_write_to_its_cotangent(other):
    def backward(_, ct):
        ct *= 3
        return (ct,)

    f = polybridge.wrap(lambda a: a * 3, src="numpy", dst=other.name, vjp=(lambda a: (a * 3, None), backward))
    ct = np.array([1.0, 10.0])
    for _ in range(4):
        _, (gradient,) = other.vjp(f, [other.tensor([1.0, 2.0], "float64")], [ct])
        assert other.numpy(gradient).tolist() == [3.0, 30.0]


def test_an_argument_may_be_written_to_between_the_call_and_the_pullback(other):
    x = np.array([1.0, 2.0])
    f = polybridge.wrap(lambda t: t * t, src=other.name, dst="numpy")
    for _ in range(4):
        x[:] = 1.0, 2.0
        _, pullback = f.vjp(x)
        x[:] = 99.0
        assert pullback(np.ones(2))[0].tolist() == [2.0, 4.0]


def test_results_and_gradients_may_be_written_to(other):
    x = np.array([1.0, 2.0])
    y, pullback = polybridge.wrap(lambda t: t * t, src=other.name, dst="numpy").vjp(x)
    y[:] = 99.0
    (gradient,) = pullback(np.ones(2))
    gradient[:] = 99.0
    assert pullback(np.ones(2))[0].tolist() == [2.0, 4.0]


def test_gradients_do_not_share_memory(other):
    f = polybridge.wrap(lambda a, b: other.sum(a + b), src=other.name, dst="numpy")
    by_a, by_b = f.grad(np.ones(3), np.ones(3), argnums=(0, 1))
    assert not np.shares_memory(by_a, by_b)


def test_an_identity_returns_a_copy(other):
    x = np.ones(3)
    assert not np.shares_memory(polybridge.wrap(other.identity, src=other.name, dst="numpy")(x), x)


def test_a_function_that_writes_to_its_input_can_be_differentiated():
    f = polybridge.wrap(lambda x: x.mul_(3).sum(), src="torch", dst="numpy")
    x = np.ones(2)
    for _ in range(4):
        assert f.grad(x).tolist() == [3.0, 3.0]
    assert x.tolist() == [1.0, 1.0]


def counts(fn, *xs):
    """Return what crosses in a call of a function that has been called before."""
    fn(*xs), fn(*xs)
    with count_crossings() as counter:
        fn(*xs)
    return counter.crossings, counter.copies, counter.bytes_copied


def test_an_argument_is_copied_once_and_a_fresh_result_of_torch_is_handed_over():
    f = polybridge.wrap(lambda x: x * 2, src="torch", dst="numpy")
    assert counts(f, np.ones(1000)) == (2, 1, 8000)


def test_a_gradient_of_torch_is_handed_over():
    f = polybridge.wrap(lambda x: (x * x).sum(), src="torch", dst="numpy")
    assert counts(f.grad, np.ones(1000)) == (4, 2, 8000 + 8)  # the argument, and the cotangent of one number


def test_arguments_and_results_of_tensorflow_are_copied_once():
    f = polybridge.wrap(lambda x: x * 2, src="tensorflow", dst="numpy")
    assert counts(f, np.ones(1000)) == (2, 2, 16000)


def test_a_fresh_result_of_numpy_is_handed_over_to_torch():
    f = polybridge.wrap(lambda x: x * 2, src="numpy", dst="torch")
    assert counts(f, torch.ones(1000)) == (2, 1, 4000)


HELD = []
NOT_FREE = {
    "held": lambda x: (HELD.append(y := x * 2), y)[1],
    "a_view_of_what_is_held": lambda x: (HELD.append(y := x * 2), y[10:])[1],
    "strided": lambda x: np.ones(2000)[::2],
    "reversed": lambda x: np.ones(1000)[::-1],
    "read_only": lambda x: _frozen(np.ones(1000)),
    "of_a_buffer": lambda x: np.frombuffer(bytearray(8000)),
    "big_endian": lambda x: np.ones(1000, ">f8"),
    "broadcast": lambda x: np.broadcast_to(1.0, (1000,)),
}


@pytest.mark.parametrize("fn", NOT_FREE.values(), ids=NOT_FREE)
def test_a_result_of_numpy_that_is_not_free_is_copied(fn):
    f = polybridge.wrap(fn, src="numpy", dst="torch")
    assert counts(f, torch.ones(1000, dtype=torch.float64))[1] == 2


def test_one_array_as_two_results_is_copied_for_one_of_them():
    f = polybridge.wrap(lambda: (y := np.ones(1000), y), src="numpy", dst="torch")
    first, second = f()
    first += 1
    assert float(second.sum()) == 1000
    assert counts(f)[:2] == (2, 1)


def test_a_residual_is_not_handed_over():
    f = polybridge.wrap(np.exp, src="numpy", dst="torch", vjp=(lambda x: (y := np.exp(x), y), lambda y, ct: (ct * y,)))
    x = torch.zeros(3, requires_grad=True)
    y = f(x)
    y.detach().mul_(99)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0] * 3


@layouts
def test_a_torch_function_that_writes_leaves_an_array_of_any_layout_alone(make):
    x = make(sample((4, 6)))
    before = plain(x)
    f = polybridge.wrap(lambda t: t.mul_(2), src="torch", dst="numpy")
    for _ in range(4):
        assert_identical(f(x), before * 2)
    assert_identical(plain(x), before)


def test_copy_false_shares_the_callers_array():
    x = np.ones(3)
    polybridge.wrap(lambda t: t.mul_(2), src="torch", dst="numpy", copy=False)(x)
    assert x.tolist() == [2.0] * 3
