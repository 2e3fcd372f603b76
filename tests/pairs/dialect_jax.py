"""JAX under the names of the tests, with 64 bits on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

import polybridge
from tests.pairs.dialects import Array, Dialect, Fn, cotangent, sample

jax.config.update("jax_enable_x64", True)

_UNTRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


class Jax(Dialect):
    """JAX's own arrays, transforms and operations. Its complex cotangents are conjugated to the others' convention."""

    name = "jax"
    writes = False
    traces = True
    sin = staticmethod(jnp.sin)
    cos = staticmethod(jnp.cos)
    exp = staticmethod(jnp.exp)
    tanh = staticmethod(jnp.tanh)
    sqrt = staticmethod(jnp.sqrt)
    abs = staticmethod(jnp.abs)
    square = staticmethod(jnp.square)
    softmax = staticmethod(jax.nn.softmax)
    maximum = staticmethod(jnp.maximum)
    where = staticmethod(jnp.where)
    real = staticmethod(jnp.real)
    imag = staticmethod(jnp.imag)
    conj = staticmethod(jnp.conj)
    complex = staticmethod(jax.lax.complex)
    zeros_like = staticmethod(jnp.zeros_like)
    reshape = staticmethod(jnp.reshape)
    stop_gradient = staticmethod(jax.lax.stop_gradient)

    def identity(self, x: jax.Array) -> jax.Array:
        return x

    def copy(self, x: jax.Array) -> jax.Array:
        return jnp.copy(x)

    def tensor(self, values: Any, dtype: str | None = None) -> jax.Array:
        if isinstance(values, (np.ndarray, np.generic)):
            return jnp.array(values, dtype)
        array = np.array(values)
        default = {"f": "float32", "c": "complex64", "i": "int32"}.get(array.dtype.kind)
        return jnp.array(array, dtype or default)

    def numpy(self, tensor: jax.Array) -> Array:
        return np.array(tensor)

    def dtype(self, tensor: jax.Array) -> str:
        return tensor.dtype.name

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def parameter(self, values: Any) -> jax.Array:
        return self.tensor(values)

    def layouts(self) -> dict[str, jax.Array]:
        x = jnp.array(sample((6, 8)))
        columns = Format(Layout(major_to_minor=(1, 0)), x.sharding)
        return {
            "contiguous": x,
            "scalar": jnp.float32(0.5),
            "empty": jnp.zeros([0], "float32"),
            "empty_matrix": jnp.zeros([3, 0], "float32"),
            "size_one": jnp.array([[[0.5]]], "float32"),
            "row": x[1],
            "element": x[1, 3],
            "tail": x[1:],
            "every_second": x[::2, 1::3],
            "transposed": x.T,
            "column_major": jax.device_put(x, columns),
            "broadcast": jnp.broadcast_to(jnp.float32(0.5), (4,)),
            "reversed": x[::-1],
            "from_numpy": jnp.asarray(sample((101,))),
            "result_of_compiled_code": jax.jit(lambda x: x * 2)(x),
            "real_part": jnp.real(jnp.array(sample((5, 3), "complex64"))),
        }

    def vjp(
        self, fn: Fn, xs: Sequence[jax.Array], cts: Sequence[Array] | None = None
    ) -> tuple[list[jax.Array], list[Any]]:
        try:
            return self._vjp(fn, xs, cts)
        except jax.errors.JaxRuntimeError as error:  # with which JAX replaces what a call in compiled code raises
            raise polybridge.last_error() or error from error
        except polybridge.PromisedShapeError as error:  # what the function raised when its result was planned
            raise error.__cause__ or error from None

    def _vjp(self, fn: Fn, xs: Sequence[jax.Array], cts: Sequence[Array] | None) -> tuple[list[jax.Array], list[Any]]:
        wanted = [i for i, x in enumerate(xs) if _differentiable(x)]
        kinds: list[bool] = []

        def outputs(constants: Sequence[jax.Array], primals: Sequence[jax.Array]) -> Any:
            given = list(constants)
            for i, x in zip(wanted, primals, strict=True):
                given[i] = x
            found = fn(*given)
            ys = [found] if isinstance(found, jax.Array) else [jnp.asarray(y) for y in found]
            kinds[:] = map(_differentiable, ys)
            return [y for y in ys if _differentiable(y)], [y for y in ys if not _differentiable(y)]

        def forward(constants: Any, primals: Any) -> Any:
            return jax.vjp(lambda *primals: outputs(constants, primals), *primals, has_aux=True)

        primals = [xs[i] for i in wanted]
        try:  # compiled, as JAX programs are; the bits may differ from those of single operations
            differentiable, pull, others = jax.jit(forward)(list(xs), primals)
        except _UNTRACEABLE:
            differentiable, pull, others = forward(list(xs), primals)
        except polybridge.PromisedShapeError as error:  # a function of another framework that asks for values
            if "DataDependent" not in type(error.__cause__).__name__:
                raise
            differentiable, pull, others = forward(list(xs), primals)
        cts = [cotangent(y.shape, self.dtype(y)) for y in differentiable] if cts is None else cts
        found = jax.jit(_pulled)(pull, [self.tensor(ct) for ct in cts])
        following, rest = iter(differentiable), iter(others)
        gradients = dict(zip(wanted, found, strict=True))
        ys = [next(following) if kind else next(rest) for kind in kinds]
        return ys, [gradients.get(i) for i in range(len(xs))]

    def derivative(self, fn: Fn) -> Fn:
        return jax.grad(lambda x: jnp.sum(fn(x)))

    def sum(self, x: jax.Array, axis: int | None = None) -> jax.Array:
        return jnp.sum(x, axis=axis)

    def max(self, x: jax.Array, axis: int) -> jax.Array:
        return jnp.max(x, axis=axis)

    def argmax(self, x: jax.Array) -> jax.Array:
        return jnp.argmax(x)

    def cumsum(self, x: jax.Array, axis: int) -> jax.Array:
        return jnp.cumsum(x, axis=axis)

    def transpose(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        return jnp.transpose(x, axes)

    def concat(self, xs: Sequence[jax.Array], axis: int = 0) -> jax.Array:
        return jnp.concatenate(list(xs), axis)

    def take(self, x: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.take(x, indices, axis=0)

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        return x.astype(dtype)


def _differentiable(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _pulled(pull: Fn, cts: list[jax.Array]) -> list[jax.Array]:
    return [gradient.conj() for gradient in pull([ct.conj() for ct in cts])]


DIALECT = Jax()
