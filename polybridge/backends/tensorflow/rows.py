"""Gradients of which some are rows, as results of an operation, which are dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Tensor = Any


@dataclass(frozen=True)
class Layout:
    """How gradients go through an operation: one that is rows takes two of its results, indices and values.

    Args:
        specs: of the gradients as dense tensors.
        sparse: whether each is rows.
    """

    specs: Sequence[tf.TensorSpec]
    sparse: Sequence[bool]

    @property
    def promised(self) -> list[tf.TensorSpec]:
        """The specs of the operation's results."""
        promised = []
        for spec, sparse in zip(self.specs, self.sparse, strict=True):
            promised += [_INDICES, tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)] if sparse else [spec]
        return promised

    def split(self, gradients: Sequence[Any]) -> list[Tensor]:
        """Return gradients, each a tensor or `tf.IndexedSlices`, as results."""
        results = []
        for gradient, sparse in zip(gradients, self.sparse, strict=True):
            if not sparse:
                results.append(tf.convert_to_tensor(gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                results += [gradient.indices, gradient.values]
            else:
                results += [tf.range(tf.shape(gradient, tf.int64)[0], dtype=tf.int64), gradient]
        return results

    def split_batches(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return dense gradients for a batch of examples as results."""
        results = []
        for gradient, sparse in zip(gradients, self.sparse, strict=True):
            if sparse:
                size, count = tf.unstack(tf.shape(gradient, tf.int64)[:2])
                results.append(tf.tile(tf.range(count)[None], [size, 1]))
            results.append(gradient)
        return results

    def join(self, results: Sequence[Tensor]) -> list[Any]:
        """Return results as gradients."""
        following = iter(results)
        return [
            _slices(next(following), next(following), spec) if sparse else next(following)
            for spec, sparse in zip(self.specs, self.sparse, strict=True)
        ]

    def cotangents(self, results: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor]:
        """Return the cotangents of the gradients by those of the results.

        Rows that were not looked up have no influence on anything, hence the zeros there.
        """
        following, given = iter(results), iter(cts)
        found = []
        for spec, sparse in zip(self.specs, self.sparse, strict=True):
            indices, ct = next(following), next(given)
            if sparse:
                next(following)
                ct = tf.tensor_scatter_nd_update(tf.zeros(spec.shape, spec.dtype), indices[:, None], next(given))
            found.append(ct)
        return found


_INDICES = tf.TensorSpec([None], tf.int64)


def _slices(indices: Tensor, values: Tensor, spec: tf.TensorSpec) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, indices, tf.constant(spec.shape.as_list(), tf.int64))
