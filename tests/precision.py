"""The precision that JAX computes in, for folders of tests that want it as it comes."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def jax_has_32_bits() -> Iterator[None]:
    """JAX as it comes, whatever ran before in this process."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)
