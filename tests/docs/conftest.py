"""Fixtures of the tests of the documentation."""

from tests.precision import jax_has_32_bits as jax_has_32_bits
