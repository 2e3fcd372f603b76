"""Tokens of JAX carry 64 bits in numbers of 32, and show when their rows are not those of one evaluation."""

import numpy as np
import pytest

pytest.importorskip("jax")

import polybridge
from polybridge.backends.jax import tokens

NUMBER = 3 << 32 | 5


@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 2)])
def test_the_number_comes_back(rows):
    assert tokens.read(written(rows)) == NUMBER


def test_a_token_without_rows_is_left_alone():
    assert written((0,)).size == 0


def test_rows_in_another_order_are_refused():
    with pytest.raises(polybridge.ResidualError, match="not evaluated as this batch"):
        tokens.read(written((3,))[::-1])


def test_a_row_of_a_batch_is_refused():
    with pytest.raises(polybridge.ResidualError, match="taken apart"):
        tokens.read(written((3,))[1])


def written(rows):
    token = np.zeros((*rows, tokens.SIZE), np.uint32)
    tokens.write(token, NUMBER)
    return token
