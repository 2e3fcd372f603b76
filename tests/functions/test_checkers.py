"""Holds many functions, called from another framework, against their own one and against finite differences."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.functions import of_jax, of_tensorflow, of_torch
from tests.functions.checkers import CHECKERS
from tests.functions.points import Array, real
from tests.pairs.dialects import PAIRS, Fn, Pair, dialect

FUNCTIONS = {"torch": of_torch.FUNCTIONS, "tensorflow": of_tensorflow.FUNCTIONS, "jax": of_jax.FUNCTIONS}
UNKNOWN_SHAPES = {("torch", "boolean_mask"), ("tensorflow", "boolean_mask"), ("tensorflow", "segment_sum")}
"""JAX asks for `output_specs=` of these, since they depend on values."""
CASES = [
    pytest.param((src, dst, name), id=f"{src}->{dst}-{name}")
    for src, dst in PAIRS
    for name in FUNCTIONS[src]
    if dst != "jax" or (src, name) not in UNKNOWN_SHAPES
]


@dataclass(frozen=True)
class Case:
    """A function of one framework in another."""

    name: str
    pair: Pair
    fn: Fn
    wrapped: Fn
    points: list[Array]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Every function in every pair; the tests of one share what is compiled for it, which takes most of the time."""
    src, dst, name = request.param
    fn, *points = FUNCTIONS[src][name]
    pair = Pair(dialect(src), dialect(dst))
    yield Case(name, pair, fn, pair.wrap(fn), points)


def test_values_and_gradients_are_those_of_the_source_bit_by_bit(case: Case) -> None:
    case.pair.assert_native(case.fn, *map(case.pair.dst.tensor, case.points), wrapped=case.wrapped)


def test_derivatives_pass_the_checker_of_the_destination(case: Case) -> None:
    if case.name == "logcumsumexp" and case.pair.dst.name == "jax":
        pytest.skip("its gradient takes logarithms of cotangents, which have no second derivative at 0")
    # JAX compiles each order; torch's checker asks for the second of the same functions.
    options = {"order": 1} if (case.pair.src.name, case.pair.dst.name) == ("jax", "tensorflow") else {}
    CHECKERS[case.pair.dst.name](case.wrapped, case.points, **options)


def test_sixty_functions_are_those_of_two_frameworks_or_more() -> None:
    counts = collections.Counter(name for functions in FUNCTIONS.values() for name in functions)
    assert sum(count > 1 for count in counts.values()) >= 60


def test_forward_mode_gives_the_pullback_no_zeros_to_take_logarithms_of() -> None:
    x, t = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 2.0, -1.0])
    f = polybridge.wrap(lambda x: torch.logcumsumexp(x, 0), src="torch", dst="jax")
    _, found = jax.jvp(f, (x.numpy(),), (t.numpy(),))
    _, expected = torch.func.jvp(lambda x: torch.logcumsumexp(x, 0), (x,), (t,))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradcheck_accepts_batched_gradients() -> None:
    f = polybridge.wrap(lambda x: tf.sin(x) * x, src="tensorflow", dst="torch")
    assert torch.autograd.gradcheck(f, torch.tensor(real(3), requires_grad=True), check_batched_grad=True)


def test_gradcheck_accepts_non_contiguous_cotangents() -> None:
    f = polybridge.wrap(lambda x: tf.transpose(tf.sin(x)), src="tensorflow", dst="torch")
    x = torch.tensor(real(2, 3), requires_grad=True)
    assert torch.autograd.gradgradcheck(f, x, gen_non_contig_grad_outputs=True)
