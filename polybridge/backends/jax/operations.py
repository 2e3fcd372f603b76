"""A relay as the static part of JAX operations: what it returns, how it is batched, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from polybridge.backends.jax import convert
from polybridge.backends.jax.buffers import BUFFERS
from polybridge.core import orders, residuals
from polybridge.core.abstract import Abstract
from polybridge.core.batching import Axes, BatchedRelay, batched
from polybridge.core.errors import PromisedShapeError, ResidualError
from polybridge.core.exchange import Exchange
from polybridge.core.relay import FunctionRelay, Relay
from polybridge.core.specs import TensorSpec, dtype

Tensor = Any
Array = np.ndarray[Any, Any]
T = TypeVar("T")
AnyRelay = FunctionRelay | BatchedRelay
TOKEN = 4
"""Numbers of 32 bits in a token: two for that of its residual, its row in a batch, and how many rows there are."""
_PLANS = 256  # signatures whose plans one operation remembers


class Operation:
    """A relay with all that JAX's operations on it need. JAX tells operations apart by identity.

    Args:
        relay: on JAX arrays.
        host: the same on buffers of XLA, made when it is first needed.
    """

    def __init__(self, relay: AnyRelay, host: AnyRelay | None = None) -> None:
        """Run nothing yet."""
        self.relay, self.call = relay, relay.call
        self._host = host
        self._plans: dict[tuple[TensorSpec, ...], Abstract] = {}
        self._batched: dict[Axes, Operation] = {}

    def __repr__(self) -> str:
        """Return the name of the function, as a jaxpr shows it."""
        return self.call

    @property
    def host(self) -> AnyRelay:
        """The relay on buffers of XLA."""
        if self._host is None:
            assert isinstance(self.relay, FunctionRelay)
            exchange = self.relay.exchange
            over_buffers = Exchange(BUFFERS, exchange.source, exchange.copy, fleeting=True)
            self._host = FunctionRelay(self.relay.program, over_buffers)
        return self._host

    def batched(self, axes: Axes) -> Operation:
        """Return the operation over a batch, with the examples of every result along axis 0."""
        found = self._batched.get(axes)
        if found is None:
            found = self._batched.setdefault(axes, Operation(batched(self.relay, axes), batched(self.host, axes)))
        return found

    def plan(self, avals: Sequence[Any]) -> Abstract:
        """Return the plan of an evaluation at arrays of these types.

        Raises:
            PromisedShapeError: the shapes of the results cannot be known.
        """
        specs = tuple(map(convert.spec, avals))
        plan = self._plans.get(specs)
        if plan is None:
            plan = self.relay.abstract(specs, differentiable(avals))
            if not all(spec.concrete for spec in plan.specs):
                raise PromisedShapeError.open_in_jax(self.call, plan.specs)
            while len(self._plans) >= _PLANS:
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[specs] = plan
        return plan

    # At once, on JAX arrays.

    def evaluate(self, xs: Sequence[Tensor], keep: bool, rows: tuple[int, ...]) -> list[Tensor]:
        """Return the results, and a token of shape `(*rows, TOKEN)` if the residual is to be kept."""
        if not keep:
            return self.relay(xs).leaves
        outcome, back = self.relay.vjp(xs, differentiable(xs))
        count = int(np.prod(rows, dtype=np.int64))
        numbers = residuals.keep(back, TOKEN // 2 * count).view(np.uint32).reshape(count, TOKEN)
        numbers[:, 2:] = _places(count)
        return [*outcome.leaves, jax.dlpack.from_dlpack(numbers.reshape(*rows, TOKEN))]

    def pull(self, token: Tensor, xs: Sequence[Tensor], cts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the pull of order `len(cts)`; see `core.orders`."""
        found = self._pulled(self.relay, jnp.conj, None, token, xs, cts)
        primals = [xs[i] for i in differentiable(xs)]
        like = [*primals, *(ct for group in cts[:-1] for ct in group)]
        return [jnp.zeros(v.shape, v.dtype) if x is None else x for x, v in zip(found, like, strict=True)]

    # On the host, under compiled code.

    def evaluate_on_host(self, plan: Abstract, keep: bool, xs: Sequence[Any], outs: Sequence[Any]) -> None:
        """Write the results, and the token if the residual is to be kept, into buffers of XLA."""
        if keep:
            randomness = self.relay.exchange.source.randomness()
            outcome, back = self.host.vjp(xs, differentiable(xs))
            *outs, token = outs
            numbers = np.asarray(token).reshape(-1, TOKEN)
            numbers[:, :2] = np.array([residuals.stash(back, outcome.leaves, randomness)]).view(np.uint32)
            numbers[:, 2:] = _places(len(numbers))
        else:  # the first run is differentiated, to see whether it holds weights
            outcome = self.host(xs) if self.host.told else self.host.vjp(xs, ())[0]
        if len(outcome.leaves) != len(outs):
            raise PromisedShapeError.differs(self.call, "the result", f"{len(outcome.leaves)} tensors", f"{len(outs)}")
        for i, (out, leaf, promised) in enumerate(zip(outs, outcome.leaves, plan.specs, strict=True)):
            found = TensorSpec(leaf.shape, leaf.dtype.name)
            if found != promised:
                assert plan.structure is not None
                raise PromisedShapeError.differs(self.call, plan.structure.result(i), found, promised)
            _write(out, leaf)

    def pull_on_host(
        self, plan: Abstract, token: Any, xs: Sequence[Any], cts: Sequence[Sequence[Any]], outs: Sequence[Any]
    ) -> None:
        """Write the pull of order `len(cts)` into buffers of XLA; None for a result that nobody reads."""
        found = self._pulled(self.host, np.conj, plan, token, xs, cts)
        for out, x in zip(outs, found, strict=True):
            if out is not None:
                _write(out, 0 if x is None else x)

    def _pulled(
        self,
        relay: AnyRelay,
        conj: Callable[[Tensor], Tensor],
        plan: Abstract | None,
        token: Tensor,
        xs: Sequence[Tensor],
        cts: Sequence[Sequence[Tensor]],
    ) -> list[Tensor | None]:
        """Return the pull, in JAX's convention, which is the conjugate of the contract's.

        With a plan, the cotangents get the dtypes that the source gave its results, which JAX may have narrowed.
        """
        back = residuals.stashed(_number(token), lambda: _again(relay, xs))
        primals = [xs[i] for i in differentiable(xs)]
        taken = list(map(list, cts))
        if plan is not None:
            outputs = [spec.dtype for spec, d in zip(plan.specs, plan.differentiable, strict=True) if d]
            names, _ = follow([convert.spec(x).dtype for x in primals], outputs, len(cts), lambda name: name)
            taken = [[_cast(*pair) for pair in zip(*group, strict=True)] for group in zip(taken, names, strict=True)]
        ins, outs = follow([False] * len(primals), [False] * len(cts[0]), len(cts), lambda flag: not flag)
        taken = [[_conj(conj, *pair) for pair in zip(*group, strict=True)] for group in zip(taken, ins, strict=True)]
        return [_conj(conj, x, flag) for x, flag in zip(orders.pull(back, primals, taken), outs, strict=True)]


def differentiable(xs: Sequence[Any]) -> list[int]:
    """Return which arrays or types of arrays are floating or complex."""
    return [i for i, x in enumerate(xs) if convert.is_differentiable(x)]


def follow(primals: list[T], outputs: list[T], count: int, turned: Callable[[T], T]) -> tuple[list[list[T]], list[T]]:
    """Follow a fact about tensors through the orders of derivatives, in each of which results and inputs change places.

    Returns:
        For each order the fact about its cotangents, and that about the results of the last order.
    """
    cts = []
    for _ in range(count):
        cts.append([turned(x) for x in outputs])
        outputs, primals = [turned(x) for x in primals], primals + cts[-1]
    return cts, outputs


def _places(count: int) -> Array:
    """Return what each row of a token says after its number: which row it is, and of how many."""
    return np.stack([np.arange(count), np.full(count, count)], axis=-1).astype(np.uint32)


def _number(token: Tensor) -> int:
    """Return the number of a token's residual.

    Raises:
        ResidualError: its rows are not those of one evaluation in their order.
    """
    rows = np.asarray(token).reshape(-1, TOKEN)
    if (rows[:, 2:] != _places(len(rows))).any() or (rows[:, :2] != rows[0, :2]).any():
        raise ResidualError.mixed()
    return int(np.ascontiguousarray(rows[0, :2]).view(np.int64)[0])


def _again(relay: AnyRelay, xs: Sequence[Tensor]) -> tuple[Relay, list[Array]]:
    outcome, back = relay.vjp(xs, differentiable(xs))
    return back, list(map(np.asarray, outcome.leaves))


def _cast(x: Tensor, name: str) -> Tensor:
    return x if np.asarray(x).dtype.name == name else np.asarray(x).astype(dtype(name))


def _conj(conj: Callable[[Tensor], Tensor], x: Tensor | None, flag: bool) -> Tensor | None:
    return conj(x) if flag and x is not None and np.dtype(x.dtype).kind == "c" else x


def _write(out: Any, x: Any) -> None:
    """Copy values into a buffer of XLA, whose dtype may be narrower.

    Raises:
        UnsupportedTensorError: integers that do not fit.
    """
    target = np.asarray(out)
    source = np.asarray(x)
    if target.dtype.kind in "iu" and source.dtype.itemsize > target.dtype.itemsize:
        source = convert.narrowed(source)
    np.copyto(target, source, casting="unsafe")
