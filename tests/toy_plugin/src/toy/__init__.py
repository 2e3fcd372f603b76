"""A toy framework: arrays over NumPy that differentiate themselves in reverse mode, to any order.

While somebody differentiates, every operation leaves a `Node` that knows the way back from the cotangents of its
outputs to those of its inputs. The way back is made of these same operations, so it can be differentiated again.

NumPy's own functions are the operations on single numbers: `numpy.sin(x)`, which is also `toy.sin(x)`.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy import conj, cos, exp, log, matmul, sin

__all__ = ["Array", "array", "conj", "cos", "exp", "grad", "is_followed", "log", "matmul", "operation", "sin", "vjp"]

Cotangents = Sequence["Array | None"]


class Node:
    """An operation that was recorded, as `operation` describes it."""

    __slots__ = ("inputs", "number", "outputs", "pullback")
    _numbers = itertools.count()

    def __init__(self, inputs: Sequence[Array], outputs: int, pullback: Callable[[Cotangents], Cotangents]) -> None:
        self.inputs, self.outputs, self.pullback = inputs, outputs, pullback
        self.number = next(self._numbers)  # greater than those of the operations that it depends on


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An immutable array, and where it came from: its node and which of the node's outputs it is."""

    __slots__ = ("__weakref__", "index", "node", "value")

    def __init__(self, value: np.ndarray[Any, Any], node: Node | None = None, index: int = 0) -> None:
        self.value, self.node, self.index = np.asarray(value).view(), node, index
        self.value.flags.writeable = False

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)

    def __repr__(self) -> str:
        return f"toy.{self.value!r}"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **options: Any) -> Any:
        if method != "__call__" or options or ufunc not in PULLBACKS:
            return NotImplemented
        value = ufunc(*(x.value if isinstance(x, Array) else x for x in args))
        followed = [(x, pull) for x, pull in zip(args, PULLBACKS[ufunc], strict=False) if isinstance(x, Array)]
        return _single(value, [x for x, _ in followed], lambda ct: [_like(pull(ct, *args), x) for x, pull in followed])

    def __getitem__(self, index: Any) -> Array:
        return _single(self.value[index], [self], lambda ct: [_scatter(ct, index, self.shape)])

    def reshape(self, *shape: int) -> Array:
        """Return the same numbers in another shape."""
        return _single(self.value.reshape(shape), [self], lambda ct: [ct.reshape(*self.shape)])

    def sum(self, axis: int | tuple[int, ...] | None = None) -> Array:
        """Return the sum over some axes, or over all."""
        kept = self.value.sum(axis, keepdims=True).shape
        return _single(self.value.sum(axis), [self], lambda ct: [_broadcast(ct.reshape(*kept), self.shape)])

    def astype(self, dtype: Any) -> Array:
        """Return the numbers in another dtype, of complex ones the real part where that is a real dtype."""
        value = self.value if np.dtype(dtype).kind == "c" else self.value.real
        return _single(value.astype(dtype), [self], lambda ct: [ct.astype(self.dtype)])


def array(value: Any, dtype: Any = None) -> Array:
    """Return a copy of numbers, a list of them or a NumPy array."""
    return Array(np.array(value, dtype))


# For each argument of an operation, its cotangent by that of the result. Complex numbers follow torch's convention:
# the cotangent of y = f(z) is pulled back to conj(f'(z)) * ct.
PULLBACKS: dict[np.ufunc, tuple[Callable[..., Array], ...]] = {
    np.add: (lambda ct, x, y: ct, lambda ct, x, y: ct),
    np.subtract: (lambda ct, x, y: ct, lambda ct, x, y: -ct),
    np.multiply: (lambda ct, x, y: ct * conj(y), lambda ct, x, y: ct * conj(x)),
    np.divide: (lambda ct, x, y: ct / conj(y), lambda ct, x, y: -ct * conj(x / y**2)),
    np.power: (lambda ct, x, y: ct * conj(y * x ** (y - (y != 0))), lambda ct, x, y: ct * conj(log(x) * x**y)),
    np.matmul: (lambda ct, x, y: ct @ _transpose(conj(y)), lambda ct, x, y: _transpose(conj(x)) @ ct),
    np.negative: (lambda ct, x: -ct,),
    np.conj: (lambda ct, x: conj(ct),),
    np.exp: (lambda ct, x: ct * conj(exp(x)),),
    np.log: (lambda ct, x: ct / conj(x),),
    np.sin: (lambda ct, x: ct * conj(cos(x)),),
    np.cos: (lambda ct, x: -ct * conj(sin(x)),),
    **dict.fromkeys((np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal), ()),
}


def vjp(fn: Callable[..., Sequence[Array]], primals: Sequence[Array]) -> tuple[Sequence[Array], Callable[..., Any]]:
    """Return the outputs of `fn(*primals)` and its pullback, from their cotangents to those of the primals."""
    with _recording():
        inputs = [_watched(x) for x in primals]
        outputs = list(fn(*inputs))
    return outputs, lambda cts: _backward(outputs, inputs, cts)


def grad(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Return the gradient of a scalar function with respect to its first argument."""

    def gradient(x: Array, *rest: Any) -> Array:
        (y,), pullback = vjp(lambda x: [fn(x, *rest)], [x])
        if y.shape != ():
            raise TypeError(f"toy.grad takes a function with a scalar result, got one of shape {y.shape}")
        (ct,) = pullback([Array(np.ones((), y.dtype))])
        return Array(np.zeros(x.shape, x.dtype)) if ct is None else ct

    return gradient


def is_followed(x: Array) -> bool:
    """Whether this thread is differentiating, and `x` depends on what it differentiates with respect to."""
    return _thread.depth > 0 and x.node is not None


def operation(
    values: Sequence[np.ndarray[Any, Any] | None],
    inputs: Sequence[Array],
    pullback: Callable[[Cotangents], Cotangents],
) -> list[Array | None]:
    """Return the outputs of an operation as arrays that remember it; the door for operations that are not ours.

    Args:
        values: of the outputs; None where there is none.
        inputs: the arrays that they depend on.
        pullback: from a cotangent for each output (None is zero) to one for each input (None is zero).
    """
    node = Node(inputs, len(values), pullback) if any(map(is_followed, inputs)) else None
    return [None if value is None else Array(value, node, index) for index, value in enumerate(values)]


class _Thread(threading.local):
    depth = 0  # how many functions are being differentiated on this thread


_thread = _Thread()


@contextmanager
def _recording() -> Iterator[None]:
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def _watched(x: Array) -> Array:
    """Return the same array as a place to differentiate with respect to, apart from its other uses."""
    return Array(x.value, Node([x], 1, lambda cts: cts))


def _backward(outputs: Sequence[Array], inputs: Sequence[Array], cts: Cotangents) -> list[Array | None]:
    """Walk from the newest operation to the oldest input, adding cotangents up."""
    found: dict[Node | None, list[Array | None]] = {}
    queue: list[tuple[int, Node]] = []

    def add(x: Array, ct: Array | None) -> None:
        if ct is None or x.node is None:
            return
        if x.node not in found:
            found[x.node] = [None] * x.node.outputs
            heapq.heappush(queue, (-x.node.number, x.node))
        earlier = found[x.node][x.index]
        found[x.node][x.index] = ct if earlier is None else earlier + ct

    for y, ct in zip(outputs, cts, strict=True):
        add(y, ct)
    ends = {x.node: x.node.number for x in inputs if x.node is not None}
    while queue and -queue[0][0] >= min(ends.values(), default=0):
        node = heapq.heappop(queue)[1]
        if node not in ends:
            for x, ct in zip(node.inputs, node.pullback(found.pop(node)), strict=True):
                add(x, ct)
    return [found.get(x.node, [None])[0] for x in inputs]


def _single(value: Any, inputs: Sequence[Array], pullback: Callable[[Array], Cotangents]) -> Array:
    """Return the output of an operation that has one."""
    return operation([value], inputs, lambda cts: pullback(cts[0]))[0]  # type: ignore[arg-type, return-value]


def _transpose(x: Any) -> Any:
    if not isinstance(x, Array):
        return np.swapaxes(x, -1, -2)
    return _single(np.swapaxes(x.value, -1, -2), [x], lambda ct: [_transpose(ct)])


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    return _single(np.broadcast_to(x.value, shape), [x], lambda ct: [_like(ct, x)])


def _scatter(x: Array, index: Any, shape: tuple[int, ...]) -> Array:
    value = np.zeros(shape, x.dtype)
    np.add.at(value, index, x.value)
    return _single(value, [x], lambda ct: [ct[index]])


def _like(ct: Array, x: Array) -> Array:
    """Return a cotangent summed over the axes along which `x` was broadcast, in the dtype of `x`."""
    sizes = (1,) * (len(ct.shape) - len(x.shape)) + x.shape
    axes = tuple(i for i, (size, wide) in enumerate(zip(sizes, ct.shape, strict=True)) if size == 1 != wide)
    ct = ct.sum(axes).reshape(*x.shape) if ct.shape != x.shape else ct
    return ct.astype(x.dtype) if ct.dtype != x.dtype else ct
