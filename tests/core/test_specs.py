"""Asks what a spec says of a tensor, and the table of dtypes."""

import ml_dtypes
import numpy as np
import pytest

from polybridge import TensorSpec
from polybridge.core import specs


@pytest.mark.parametrize("name", sorted(specs.SUPPORTED))
def test_every_supported_dtype_has_a_numpy_dtype_of_its_name(name):
    assert specs.dtype(name).name == name


def test_bfloat16_is_the_carriers():
    assert specs.dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_floating_and_complex_dtypes_have_derivatives(name):
    assert TensorSpec((), name).differentiable


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int64", "uint64"])
def test_integers_and_bools_have_no_derivatives(name):
    assert not TensorSpec((), name).differentiable


@pytest.mark.parametrize(
    ("shape", "text"),
    [((), "float32[]"), ((2, 3), "float32[2, 3]"), ((None, 3), "float32[?, 3]"), (None, "float32[...]")],
)
def test_a_spec_reads_as_dtype_and_shape(shape, text):
    assert str(TensorSpec(shape, "float32")) == text


@pytest.mark.parametrize(("shape", "concrete"), [((), True), ((2, 0), True), ((None,), False), (None, False)])
def test_a_spec_is_concrete_when_every_dimension_is_known(shape, concrete):
    assert TensorSpec(shape, "float32").concrete is concrete


def test_unknown_dimensions_take_a_size():
    assert TensorSpec((None, 3, None), "int8").with_unknown(7) == TensorSpec((7, 3, 7), "int8")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ((2, 3), (2, 3), (2, 3)),
        ((2, 3), (4, 3), (None, 3)),
        ((None, 3), (2, 3), (None, 3)),
        ((2,), (2, 3), None),
        (None, (2,), None),
    ],
)
def test_merging_forgets_what_differs(one, other, both):
    assert TensorSpec(one, "float32").merge(TensorSpec(other, "float32")) == TensorSpec(both, "float32")


@pytest.mark.parametrize(
    ("promised", "found", "kept"),
    [
        ((2, 3), (2, 3), True),
        ((None, 3), (5, 3), True),
        (None, (5, 3), True),
        ((2, 3), (5, 3), False),
        ((2, 3), (2, 3, 1), False),
        ((), (1,), False),
    ],
)
def test_a_promise_admits_what_fits(promised, found, kept):
    assert TensorSpec(promised, "float32").admits(TensorSpec(found, "float32")) is kept


def test_a_promise_admits_no_other_dtype():
    assert not TensorSpec(None, "float32").admits(TensorSpec((), "float64"))
