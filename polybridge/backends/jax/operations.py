"""A relay as the static part of JAX operations: what it returns, how it is batched, and how it runs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polybridge.backends.jax import convert
from polybridge.backends.jax.buffers import BUFFERS
from polybridge.core import orders, residuals, tokens
from polybridge.core.abstract import Abstract
from polybridge.core.batching import Axes, BatchedRelay, Chosen, batched
from polybridge.core.errors import PromisedShapeError, UnsupportedTensorError
from polybridge.core.exchange import Exchange
from polybridge.core.relay import FunctionRelay, Relay
from polybridge.core.specs import TensorSpec, dtype

Tensor = Any
Array = np.ndarray[Any, Any]
AnyRelay = FunctionRelay | BatchedRelay
TOKEN = np.dtype(np.uint32)  # of two for each number of a token: JAX may have no 64 bits
Types = tuple[tuple[Any, Any], ...]
"""Shape and dtype of each of several arrays."""
_owners = itertools.count()
_PLANS = 256  # signatures whose plans one operation remembers
_TYPES = 4096  # signatures whose types are known: more than JAX remembers


class Operation:
    """A relay with all that JAX's operations on it need. JAX tells operations apart by identity.

    Args:
        relay: on JAX arrays.
        host: the same on buffers of XLA, made when it is first needed.
        owners: the numbers of the operation on one example, which this one is batched from; see `owner`.
        base: the operation that this one is a variant of.
    """

    def __init__(
        self,
        relay: AnyRelay,
        host: AnyRelay | None = None,
        owners: dict[Types, int] | None = None,
        base: Operation | None = None,
    ) -> None:
        """Run nothing yet."""
        self.relay, self.call = relay, relay.call
        self._host, self._owners = host, {} if owners is None else owners
        self._plans: dict[Types, Abstract] = {}
        self._batched: dict[Axes, Operation] = {}
        self._base = base or self
        self._results: dict[Types, Types] = {}  # as JAX remembers them, by the types of the inputs
        self._latest: dict[Types, tuple[Types, Abstract]] = {}
        self._variants: dict[tuple[Types, Types], Operation] = {}
        self._varies = False

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
            over_batch = Operation(batched(self.relay, axes), batched(self.host, axes), self._owners)
            found = self._batched.setdefault(axes, over_batch)
        return found

    # JAX remembers which types an operation's results have for those of its inputs. A function whose results have
    # others at other values, or in another mode, has a variant of its operation for each.

    def now(self, avals: Sequence[Any]) -> Operation:
        """Return the variant for the results that the function has had of late at arrays of these types."""
        if not self._varies:
            return self
        latest = self._latest.get(_types(avals))
        if latest is None:
            plan = self._planned(avals)
            latest = tuple([(y.shape, dtype(convert.narrowed_dtype(y.dtype))) for y in plan.specs]), plan
        return self._variant(avals, *latest)

    def of(self, xs: Sequence[Any], results: Sequence[Any]) -> Operation:
        """Return the variant for results of these types; `results` and `xs` are arrays or their types."""
        base, types = self._base, _types(results)
        found, plan = base._latest.get(_types(xs), (None, None))
        return base._variant(xs, types, plan if found == types else None)

    def _variant(self, xs: Sequence[Any], results: Any, plan: Abstract | None) -> Operation:
        inputs, found = _types(xs), self
        known = self._results.setdefault(inputs, results)
        _bound(self._results, _TYPES)
        if known != results:
            self._varies = True
            key = inputs, results
            found = self._variants.get(key) or self._variants.setdefault(
                key, Operation(self.relay, self._host, self._owners, self)
            )
            _bound(self._variants)
        if plan is not None:
            found._plans[inputs] = plan
        return found

    def plan(self, avals: Sequence[Any]) -> Abstract:
        """Return the plan of an evaluation at arrays of these types.

        Raises:
            PromisedShapeError: the shapes of the results cannot be known.
            UnsupportedTensorError: an argument cannot cross.
        """
        inputs = _types(avals)
        plan = self._plans.get(inputs)
        if plan is None:
            plan = self._plans[inputs] = self._planned(avals)
            _bound(self._plans)
        return plan

    def _planned(self, avals: Sequence[Any]) -> Abstract:
        specs = [self._spec(number, aval) for number, aval in enumerate(avals)]
        with jax.core.eval_context():  # whoever runs JAX here does so outside of the trace
            plan = self.relay.abstract(specs, differentiable(avals))
        if not all(spec.concrete for spec in plan.specs):
            raise PromisedShapeError.open_in_jax(self.call, plan.specs)
        return plan

    def _spec(self, number: int, aval: Any) -> TensorSpec:
        try:
            return convert.spec(aval)
        except UnsupportedTensorError as error:
            raise error.at(self.call, self.relay.program.argument(number)) from None

    # At once, on JAX arrays.

    def evaluate(self, xs: Sequence[Tensor], keep: bool, rows: tuple[int, ...]) -> list[Tensor]:
        """Return the results, and a token if the residual is to be kept. What came is the plan of what follows."""
        where = convert.place(xs)
        copies = bool(rows) or where is not None  # JAX may copy a token as it takes examples apart, or elsewhere
        randomness = self.relay.exchange.source.randomness() if copies else None
        if keep:
            outcome, back = self.relay.vjp(xs, differentiable(xs))
        else:  # the first run is differentiated, to see whether it holds weights
            outcome, back = (self.relay(xs) if self.relay.told else self.relay.vjp(xs, ())[0]), None
        leaves: list[Any] = outcome.leaves
        names: Sequence[Any] = outcome.dtypes or [x.dtype.name for x in leaves]
        specs = [TensorSpec(x.shape, name) for x, name in zip(leaves, names, strict=True)]
        found = Abstract(specs, outcome.differentiable, outcome.structure, None)
        latest = self._base._latest
        latest[_types(xs)] = _types(leaves), found
        _bound(latest)
        if back is None:
            return convert.placed(leaves, where)
        if not copies:
            return [*leaves, convert.from_dlpack(tokens.keep(back, ()).view(TOKEN).__dlpack__())]
        token = np.empty((*rows, tokens.SIZE), np.int64)
        number = residuals.stash(back, list(map(np.asarray, leaves)), randomness, self.owner(xs, differentiable(xs)))
        tokens.write(token, number)
        return convert.placed([*leaves, jnp.asarray(token.view(TOKEN))], where)

    def pull(self, token: Tensor, xs: Sequence[Tensor], cts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the pull of order `len(cts)`; see `core.orders`."""
        wanted = differentiable(xs)
        primals = [xs[i] for i in wanted]
        dtypes = tuple(ct.dtype for ct in cts[0])
        converted = conversions(tuple(x.dtype for x in primals), dtypes, len(cts))
        found = _pull(self._kept(self.relay, wanted, token, xs), jnp.conj, [xs[i] for i in wanted], cts, converted)
        like = [*primals, *(ct for group in cts[:-1] for ct in group)]
        arrays = _arrays(found, like)
        if convert.place([*xs, *cts[-1]]) is None:
            return arrays
        return convert.placed(arrays, [x.sharding for x in like])  # a cotangent is where its primal is

    def push(
        self, token: Tensor, xs: Sequence[Tensor], ones: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the tangents of the results; see `core.orders`. Tangents are the same in both conventions."""
        wanted = differentiable(xs)
        back = self._kept(self.relay, wanted, token, xs)
        found = [None] * len(ones) if back is None else orders.push(back, [xs[i] for i in wanted], ones, tangents)
        return convert.placed(_arrays(found, ones), convert.place([*xs, *tangents]))

    # On the host, under compiled code.

    def evaluate_on_host(
        self, plan: Abstract, wanted: Sequence[int], owner: int, keep: bool, xs: Sequence[Any], outs: Sequence[Any]
    ) -> None:
        """Write the results, and the token if the residual is to be kept, into buffers of XLA."""
        if keep:
            source = self.relay.exchange.source
            randomness = source.randomness() if plan.draws else source.without_randomness
            outcome, back = (self._host or self.host).vjp(xs, wanted)
            arrays: list[Any] = outcome.leaves
            *outs, token = outs
            number = residuals.stash(back, arrays, randomness, owner)
            tokens.write(np.asarray(token).view(np.int64), number)
        else:  # the first run is differentiated, to see whether it holds weights
            outcome = self.host(xs) if self.host.told else self.host.vjp(xs, ())[0]
        leaves: list[Any] = outcome.leaves
        assert outcome.structure is not None and plan.structure is not None
        if not outcome.structure.is_like(plan.structure):
            raise self._broken(plan, "the result", outcome.structure, plan.structure)
        for i, (out, leaf, promised) in enumerate(zip(outs, leaves, plan.specs, strict=True)):
            if leaf.shape != promised.shape or leaf.dtype != dtype(promised.dtype):
                found = TensorSpec(leaf.shape, leaf.dtype.name)
                raise self._broken(plan, self.relay.program.result(plan.structure, i), found, promised)
            try:
                _write(out, leaf)
            except UnsupportedTensorError as error:  # integers that do not fit
                raise error.at(self.call, self.relay.program.result(plan.structure, i)) from None

    def _broken(self, plan: Abstract, path: str, found: object, promised: object) -> PromisedShapeError:
        """Return the error that a plan is not kept, and forget the plan: the next trace makes another."""
        base = self._base
        base._varies = True
        self._plans = {inputs: other for inputs, other in list(self._plans.items()) if other is not plan}
        base._latest.clear()
        return PromisedShapeError.differs(self.call, path, found, promised)

    def pull_on_host(
        self,
        conversions: Conversions,
        wanted: Sequence[int],
        token: Any,
        xs: Sequence[Any],
        cts: Sequence[Sequence[Any]],
        outs: Sequence[Any],
    ) -> None:
        """Write the pull of order `len(cts)` into buffers of XLA; None for a result that nobody reads."""
        back = self._kept(self._host or self.host, wanted, token, xs)
        found = _pull(back, _array_conj, list(map(xs.__getitem__, wanted)), cts, conversions)
        for out, x in zip(outs, found, strict=True):
            if out is not None:
                _write(out, 0 if x is None else x)

    def push_on_host(
        self,
        wanted: Sequence[int],
        token: Any,
        xs: Sequence[Any],
        ones: Sequence[Any],
        tangents: Sequence[Any],
        outs: Sequence[Any],
    ) -> None:
        """Write the tangents of the results into buffers of XLA."""
        back = self._kept(self.host, wanted, token, xs)
        found = [None] * len(ones) if back is None else orders.push(back, [xs[i] for i in wanted], ones, tangents)
        for out, x in zip(outs, found, strict=True):
            _write(out, 0 if x is None else x)

    def _kept(self, relay: AnyRelay, wanted: Sequence[int], token: Tensor, xs: Sequence[Tensor]) -> Relay | None:
        """Return the residual, by another evaluation if it is gone.

        None where no example came to the call, so that nobody reads what its derivative is.
        """
        again, numbers = functools.partial(_again, relay, wanted, xs), np.ascontiguousarray(token).view(np.int64)
        if numbers.ndim == 1:
            number = tokens.read(numbers)
            return residuals.stashed(number, again) if number else None
        owner = self.owner(xs, wanted)
        parts = [part for part in tokens.parts(numbers) if residuals.owner(part.number) == owner]
        backs = [residuals.stashed(part.number, again) for part in parts]
        if len(backs) > 1:
            return Chosen(backs, [part.rows for part in parts], relay.exchange)
        return backs[0] if backs else None

    def owner(self, xs: Sequence[Tensor], wanted: Sequence[int]) -> int:
        """Return a number that evaluations of this function share, at arrays of these types where it is differentiated.

        Others may become batched where branches are joined.
        """
        types = _types([xs[i] for i in wanted])
        number = self._owners.get(types)
        return self._owners.setdefault(types, next(_owners) % residuals.OWNERS) if number is None else number

    def conversions(self, xs: Sequence[Any], count: int) -> Conversions:
        """Return those of pulls of order `count` at arrays of these types."""
        plan = self.plan(xs)
        primals = tuple(xs[i].dtype for i in differentiable(xs))
        outputs = [spec.dtype for spec, d in zip(plan.specs, plan.differentiable, strict=True) if d]
        narrowed = outputs != list(map(convert.narrowed_dtype, outputs))
        return conversions(primals, tuple(map(dtype, outputs)), count, narrowed)


def _arrays(found: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[jax.Array]:
    """Return arrays of JAX, zeros for None."""
    return [
        jnp.zeros(v.shape, v.dtype) if x is None else x if isinstance(x, jax.Array) else jnp.array(x)
        for x, v in zip(found, like, strict=True)
    ]


def _bound(table: dict[Any, Any], size: int = _PLANS) -> None:
    while len(table) > size:
        table.pop(next(iter(table)), None)


def _types(xs: Sequence[Any]) -> Types:
    return tuple([(x.shape, x.dtype) for x in xs])


def differentiable(xs: Sequence[Any]) -> list[int]:
    """Return which arrays or types of arrays are floating or complex."""
    return [i for i, x in enumerate(xs) if convert.is_differentiable(x)]


@dataclass(frozen=True)
class Conversions:
    """What happens to the cotangents of a pull between JAX and a source.

    JAX's convention is the conjugate of the contract's, and it may have narrowed the source's dtypes. In each order
    results and inputs change places, and with them what is conjugated.

    Attributes:
        cts: for each order and cotangent its dtype in the source, and whether it is conjugated.
        outs: for each result whether it is conjugated.
        conjugates: whether anything is conjugated.
        narrowed: whether the source's dtypes may be others than JAX's.
    """

    cts: list[list[tuple[Any, bool]]]
    outs: list[bool]
    conjugates: bool
    narrowed: bool


@functools.lru_cache(maxsize=1024)
def conversions(primals: tuple[Any, ...], outputs: tuple[Any, ...], count: int, narrowed: bool = False) -> Conversions:
    """Return the conversions of a pull.

    Args:
        primals: the dtypes of the primals.
        outputs: the dtypes of the differentiable results in the source.
        count: the order.
        narrowed: whether JAX has other dtypes for the results.
    """
    inner, outer = [(d, False) for d in primals], [(d, False) for d in outputs]
    cts = []
    for _ in range(count):
        cts.append([(d, not flag) for d, flag in outer])
        outer, inner = [(d, not flag) for d, flag in inner], inner + cts[-1]
    return Conversions(cts, [flag for _, flag in outer], any(d.kind == "c" for d, _ in inner), narrowed)


def _pull(
    back: Relay | None,
    conj: Callable[[Tensor], Tensor],
    primals: Sequence[Tensor],
    cts: Sequence[Sequence[Tensor]],
    conversions: Conversions,
) -> list[Tensor | None]:
    """Return the pull in JAX's convention."""
    if back is None:
        return [None] * (len(primals) + sum(map(len, cts[:-1])))
    if conversions.narrowed:
        cts = [
            [ct if ct.dtype == d else np.asarray(ct).astype(d) for ct, (d, _) in zip(*pair, strict=True)]
            for pair in zip(cts, conversions.cts, strict=True)
        ]
    if not conversions.conjugates:
        return orders.pull(back, primals, cts)
    taken = [
        [_conj(conj, ct, flag) for ct, (_, flag) in zip(*pair, strict=True)]
        for pair in zip(cts, conversions.cts, strict=True)
    ]
    found = orders.pull(back, primals, taken)
    return [None if x is None else _conj(conj, x, flag) for x, flag in zip(found, conversions.outs, strict=True)]


def _array_conj(x: Any) -> Array:
    return np.asarray(np.conj(x))  # of an array without dimensions NumPy returns a scalar


def _again(relay: AnyRelay, wanted: Sequence[int], xs: Sequence[Tensor]) -> tuple[Relay, list[Array]]:
    outcome, back = relay.vjp(xs, wanted)
    return back, list(map(np.asarray, outcome.leaves))


def _conj(conj: Callable[[Tensor], Tensor], x: Tensor, flag: bool) -> Tensor:
    return conj(x) if flag and x.dtype.kind == "c" else x


def _write(out: Any, x: Any) -> None:
    """Copy values, or 0 for all of them, into a buffer of XLA, whose dtype may be narrower.

    Raises:
        UnsupportedTensorError: integers that do not fit.
        ValueError: another shape, where NumPy would repeat values.
    """
    target = np.asarray(out)
    if type(x) is not int and x.shape != target.shape:
        raise ValueError(f"a result of shape {tuple(x.shape)} in place of one of shape {target.shape}")
    if target.dtype.kind in "iu" and np.asarray(x).dtype.itemsize > target.dtype.itemsize:
        x = convert.narrowed(np.asarray(x))
    target[...] = x
