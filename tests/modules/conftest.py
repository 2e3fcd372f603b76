"""Fixtures of the tests of modules."""

import pytest
import tensorflow as tf

from tests.precision import jax_has_32_bits as jax_has_32_bits


@pytest.fixture(autouse=True)
def tensorflow_has_no_caching_device() -> None:
    """A loop that raised elsewhere leaves one in the default scope, which `tf.recompute_grad` refuses."""
    if tf.compat.v1.get_variable_scope().caching_device is not None:
        tf.compat.v1.reset_default_graph()
