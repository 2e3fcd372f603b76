"""Fixtures of the tests of modules."""

from collections.abc import Iterator

import jax
import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def jax_has_32_bits() -> Iterator[None]:
    """JAX as it comes, whatever ran before in this process."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def tensorflow_has_no_caching_device() -> None:
    """A loop that raised elsewhere leaves one in the default scope, which `tf.recompute_grad` refuses."""
    if tf.compat.v1.get_variable_scope().caching_device is not None:
        tf.compat.v1.reset_default_graph()
