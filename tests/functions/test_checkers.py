"""Holds many functions, called from another framework, against their own one and against finite differences."""

import collections

import pytest
import tensorflow as tf
import torch

import polybridge
from tests.functions import of_jax, of_tensorflow, of_torch
from tests.functions.checkers import CHECKERS
from tests.functions.points import real
from tests.pairs.dialects import PAIRS, Pair, dialect

FUNCTIONS = {"torch": of_torch.FUNCTIONS, "tensorflow": of_tensorflow.FUNCTIONS, "jax": of_jax.FUNCTIONS}
CASES = [pytest.param(*pair, name, id=f"{'->'.join(pair)}-{name}") for pair in PAIRS for name in FUNCTIONS[pair[0]]]


@pytest.mark.parametrize(("src", "dst", "name"), CASES)
def test_values_and_gradients_are_those_of_the_source_bit_by_bit(src: str, dst: str, name: str) -> None:
    fn, *points = FUNCTIONS[src][name]
    pair = Pair(dialect(src), dialect(dst))
    pair.assert_native(fn, *map(pair.dst.tensor, points))


@pytest.mark.parametrize(("src", "dst", "name"), CASES)
def test_both_orders_of_derivatives_pass_the_checker_of_the_destination(src: str, dst: str, name: str) -> None:
    fn, *points = FUNCTIONS[src][name]
    CHECKERS[dst](polybridge.wrap(fn, src=src, dst=dst), points)


def test_sixty_functions_are_those_of_two_frameworks_or_more() -> None:
    counts = collections.Counter(name for functions in FUNCTIONS.values() for name in functions)
    assert sum(count > 1 for count in counts.values()) >= 60


def test_gradcheck_accepts_batched_gradients() -> None:
    f = polybridge.wrap(lambda x: tf.sin(x) * x, src="tensorflow", dst="torch")
    assert torch.autograd.gradcheck(f, torch.tensor(real(3), requires_grad=True), check_batched_grad=True)


def test_gradcheck_accepts_non_contiguous_cotangents() -> None:
    f = polybridge.wrap(lambda x: tf.transpose(tf.sin(x)), src="tensorflow", dst="torch")
    x = torch.tensor(real(2, 3), requires_grad=True)
    assert torch.autograd.gradgradcheck(f, x, gen_non_contig_grad_outputs=True)
