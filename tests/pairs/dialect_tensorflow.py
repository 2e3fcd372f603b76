"""TensorFlow under the names of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.pairs.dialects import Array, Dialect, Fn, cotangent, sample


class TensorFlow(Dialect):
    """TensorFlow's own tensors, tapes and operations."""

    name = "tensorflow"
    writes = False
    sin = staticmethod(tf.sin)
    cos = staticmethod(tf.cos)
    exp = staticmethod(tf.exp)
    tanh = staticmethod(tf.tanh)
    sqrt = staticmethod(tf.sqrt)
    abs = staticmethod(tf.abs)
    square = staticmethod(tf.square)
    softmax = staticmethod(tf.nn.softmax)
    maximum = staticmethod(tf.maximum)
    where = staticmethod(tf.where)
    real = staticmethod(tf.math.real)
    imag = staticmethod(tf.math.imag)
    conj = staticmethod(tf.math.conj)
    complex = staticmethod(tf.complex)
    zeros_like = staticmethod(tf.zeros_like)
    reshape = staticmethod(tf.reshape)
    stop_gradient = staticmethod(tf.stop_gradient)

    def identity(self, x: tf.Tensor) -> tf.Tensor:
        return x

    def copy(self, x: tf.Tensor) -> tf.Tensor:
        return tf.concat([x[None], x[None]], axis=0)[0]

    def tensor(self, values: Any, dtype: str | None = None) -> tf.Tensor:
        copied = np.array(values) if isinstance(values, (np.ndarray, np.generic)) else values
        return tf.constant(copied, dtype=dtype)

    def numpy(self, tensor: Any) -> Array:
        return np.array(tf.convert_to_tensor(tensor).numpy())

    def dtype(self, tensor: Any) -> str:
        return str(tf.as_dtype(tensor.dtype).name)

    def is_tensor(self, value: Any) -> bool:
        return tf.is_tensor(value)

    def parameter(self, values: Any) -> tf.Variable:
        return tf.Variable(self.tensor(values))

    def layouts(self) -> dict[str, Any]:
        x = tf.constant(sample((6, 8)))
        return {
            "contiguous": x,
            "scalar": tf.constant(0.5),
            "empty": tf.zeros([0]),
            "empty_matrix": tf.zeros([3, 0]),
            "size_one": tf.constant([[[0.5]]]),
            "row": x[1],
            "element": x[1, 3],
            "tail": x[1:],
            "tail_of_a_vector": x[0][1:],
            "chunk": tf.split(x, 2)[1],
            "unstacked": tf.unstack(x)[3],
            "every_second": x[::2, 1::3],
            "transposed": tf.transpose(x),
            "reshaped": tf.reshape(x, [2, 24]),
            "broadcast": tf.broadcast_to(tf.constant(0.5), [4]),
            "reversed": x[::-1],
            "variable": tf.Variable(x),
            "variable_value": tf.Variable(x).read_value(),
            "real_part": tf.math.real(tf.constant(sample((5, 3), "complex64"))),
        }

    def vjp(self, fn: Fn, xs: Sequence[Any], cts: Sequence[Array] | None = None) -> tuple[list[tf.Tensor], list[Any]]:
        with tf.GradientTape() as tape:
            tape.watch([x for x in xs if _differentiable(x)])
            found = fn(*xs)
        ys = [found] if tf.is_tensor(found) else list(found)
        outputs = [y for y in ys if _differentiable(y)]
        cts = [cotangent(y.shape, self.dtype(y)) for y in outputs] if cts is None else cts
        sources = [x for x in xs if _differentiable(x)]
        gradients = iter(
            tape.gradient(outputs, sources, [self.tensor(ct) for ct in cts]) if outputs else [None] * len(xs)
        )
        return ys, [_dense(next(gradients)) if _differentiable(x) else None for x in xs]

    def derivative(self, fn: Fn) -> Fn:
        def derived(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(x)
            return tape.gradient(y, x)

        return derived

    def sum(self, x: tf.Tensor, axis: int | None = None) -> tf.Tensor:
        return tf.reduce_sum(x, axis=axis)

    def max(self, x: tf.Tensor, axis: int) -> tf.Tensor:
        return tf.reduce_max(x, axis=axis)

    def argmax(self, x: tf.Tensor) -> tf.Tensor:
        return tf.argmax(x)

    def cumsum(self, x: tf.Tensor, axis: int) -> tf.Tensor:
        return tf.cumsum(x, axis=axis)

    def transpose(self, x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
        return tf.transpose(x, axes)

    def concat(self, xs: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
        return tf.concat(list(xs), axis)

    def take(self, x: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, indices)

    def cast(self, x: tf.Tensor, dtype: str) -> tf.Tensor:
        return tf.cast(x, dtype)


def _differentiable(x: Any) -> bool:
    dtype = tf.as_dtype(x.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)


DIALECT = TensorFlow()
