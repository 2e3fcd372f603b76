"""JAX's own trees of weights: the containers that it has been taught, and keys among the leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polybridge.core.trees import unused

Tensor = Any


def parts(tree: Any) -> tuple[dict[str, Tensor], Callable[[Mapping[str, Tensor]], Any]]:
    """Return the arrays of a tree by where they are, and how to put others there; typed keys as their numbers."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Tensor] = {}
    packed: list[tuple[str | None, Any]] = []  # for each leaf its name and the kind of key that it is, or no name
    for path, leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            packed.append((None, leaf))
            continue
        name = unused(jax.tree_util.keystr(path, simple=True, separator=".") or "params", named)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        named[name] = jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)
        packed.append((name, jax.random.key_impl(leaf) if is_key else None))

    def rebuilt(values: Mapping[str, Tensor]) -> Any:
        found = []
        for name, what in packed:
            if name is None:
                found.append(what)
            else:
                found.append(values[name] if what is None else jax.random.wrap_key_data(values[name], impl=what))
        return jax.tree.unflatten(treedef, found)

    return named, rebuilt
