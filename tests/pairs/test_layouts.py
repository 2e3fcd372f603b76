"""Asks that every way in which a tensor may lie in memory gives the values and gradients of a plain one."""

import ml_dtypes
import numpy as np
import pytest

from tests.pairs.dialects import PAIRS, Pair, assert_identical, dialect, sample
from tests.pairs.isolation import isolated

LAYOUTS = [
    pytest.param(src, dst, layout, id=f"{src}->{dst}-{layout}")
    for src, dst in PAIRS
    for layout in dialect(dst).layouts()
]


@pytest.fixture(scope="module", autouse=True)
def no_layout_ends_the_process():
    """TensorFlow aborts on unaligned memory: try every layout in a process of its own before using one in this."""
    isolated(_call_with_every_layout).result()


def _call_with_every_layout():
    for src, dst in PAIRS:
        pair = Pair(dialect(src), dialect(dst))
        for x in pair.dst.layouts().values():
            y = pair.wrap(lambda t, m=pair.src: m.transpose(m.sin(t) + t, range(len(t.shape))[::-1])[None])(x)
            pair.dst.numpy(pair.dst.sin(y[0]))


@pytest.mark.parametrize("src, dst, layout", LAYOUTS)
def test_layout_has_native_values_and_gradients(src, dst, layout):
    pair = Pair(dialect(src), dialect(dst))
    pair.assert_native(lambda t: pair.src.sin(t) * t, pair.dst.layouts()[layout])


@pytest.mark.parametrize("src, dst, layout", LAYOUTS)
def test_layout_is_kept_by_an_identity(src, dst, layout):
    pair = Pair(dialect(src), dialect(dst))
    x = pair.dst.layouts()[layout]
    assert_identical(pair.dst.numpy(pair.wrap(pair.src.identity)(x)), pair.dst.numpy(x))


@pytest.mark.parametrize("src, dst, layout", LAYOUTS)
def test_result_and_cotangent_of_a_layout_may_be_strided(src, dst, layout):
    """What the source returns, and the cotangent that the caller's own view of it gives back, are strided too."""
    pair = Pair(dialect(src), dialect(dst))
    s, d = pair.src, pair.dst
    wrapped = pair.wrap(lambda t: s.transpose(t, range(len(t.shape))[::-1]))
    gradient = d.gradient(lambda t: d.transpose(wrapped(t), range(len(t.shape))[::-1]) * t, x := d.layouts()[layout])
    assert_identical(gradient, 2 * d.numpy(x))


def test_expanded_cotangent_reaches_the_base_of_an_expanded_input():
    """Case 4: the cotangent of a sum has stride 0."""
    pair = Pair(dialect("tensorflow"), dialect("torch"))
    base = pair.dst.tensor([2.0]).requires_grad_()
    pair.wrap(pair.src.square)(base.expand(5)).sum().backward()
    assert base.grad.tolist() == [20.0]


def test_lazily_conjugated_tensor_crosses_as_its_value():
    """Case 6."""
    torch = dialect("torch")
    z = torch.tensor(np.array([1 + 2j], "complex64")).conj()
    assert z.is_conj()
    Pair(dialect("tensorflow"), torch).assert_native(lambda t: t * 1, z)


def test_result_may_be_lazily_conjugated_or_negative():
    pair = Pair(dialect("torch"), dialect("tensorflow"))
    z = pair.dst.tensor(sample((3,), "complex64"))
    pair.assert_native(lambda t: (t.conj(), t.conj().imag, t.real), z)


RESULTS = {
    "transposed": lambda m, t: m.transpose(t, (1, 0)),
    "row": lambda m, t: t[1],
    "tail": lambda m, t: t[1:],
    "element": lambda m, t: t[1, 1],
    "every_second": lambda m, t: t[:, ::2],
    "expanded": lambda m, t: m.sum(t) + m.zeros_like(t)[:0],
    "both_halves": lambda m, t: (t[:2], t[2:]),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_result_may_be_a_view(pair, result):
    pair.assert_native(lambda t: result(pair.src, t), pair.dst.tensor(sample((5, 3))))


ARRAYS = {
    "contiguous": lambda: sample((3, 4)),
    "fortran": lambda: np.asfortranarray(sample((3, 4))),
    "transposed": lambda: sample((4, 3)).T,
    "negative_stride": lambda: sample((4,))[::-1],
    "negative_strides": lambda: sample((4, 4))[::-1, ::-2],
    "broadcast": lambda: np.broadcast_to(np.float32(0.5), (3, 4)),
    "broadcast_row": lambda: np.broadcast_to(sample((4,)), (3, 4)),
    "read_only": lambda: _read_only(sample((3, 4))),
    "unaligned": lambda: np.frombuffer(bytearray(41), "uint8")[1:].view("float32"),
    "at_4_bytes": lambda: sample((9,))[1:],
    "big_endian": lambda: sample((3, 4)).astype(">f4"),
    "zero_dimensional": lambda: np.array(0.5, "float32"),
    "scalar": lambda: np.float32(0.5),
    "double_scalar": lambda: np.float64(0.5),
    "empty": lambda: np.empty((0, 3), "float32"),
    "bfloat16": lambda: sample((3,), "bfloat16"),
    "bfloat16_scalar": lambda: ml_dtypes.bfloat16(0.5),
    "bool_scalar": lambda: np.True_,
    "subclass": lambda: sample((3, 4)).view(np.matrix),
    "memory_mapped": lambda: sample((3,)).view(np.memmap),
}


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_numpy_array_of_any_layout_crosses_as_its_values(pair, src, dst, make):
    array = make()
    expected = np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("="))
    assert_identical(dst.numpy(pair.wrap(src.identity)(array)), expected)


@pytest.mark.parametrize("make", [ARRAYS["read_only"], ARRAYS["broadcast"]], ids=["read_only", "broadcast"])
@pytest.mark.parametrize("src_name, dst_name", [("torch", "tensorflow")])
def test_read_only_array_stays_unchanged_by_a_function_that_writes(make, src_name, dst_name):
    """Case 14."""
    array = make()
    before = array.copy()
    found = Pair(dialect(src_name), dialect(dst_name)).wrap(lambda t: t.mul_(3))(array)
    assert_identical(found.numpy(), before * 3)
    assert_identical(array, before)
    assert not array.flags.writeable


def test_numpy_array_that_changes_later_leaves_the_result_alone(pair, src, dst):
    array = np.ones(64, "float32")
    result = pair.wrap(src.identity)(array)
    array += 1
    assert dst.numpy(result).tolist() == [1.0] * 64


def test_numpy_array_that_changes_before_backward_leaves_the_gradient_alone(pair, src, dst):
    array = np.full(64, 2.0, "float32")
    x = dst.tensor(np.full(64, 3.0, "float32"))
    wrapped = pair.wrap(lambda t, a: t * a)

    def changing(t):
        y = wrapped(t, array)
        array.fill(100)
        return y

    assert dst.gradient(changing, x).tolist() == [2.0] * 64
