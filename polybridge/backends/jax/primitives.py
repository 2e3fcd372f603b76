"""JAX's operations on a relay, each with a rule for every transform.

    evaluate(xs) -> (results, token)        the function; the token stands for the residual, where it is kept
    pull(token, xs, cts) -> cotangents      the pull of any order through that evaluation; see `core.orders`
    push(token, xs, cts, tangents) -> ...   the derivative of the function or of a pull, linear in the tangents

The three are closed under differentiation, transposition and batching:

    jvp of evaluate = push of order 0       jvp of a pull = push of its order       jvp of a push = push, two orders up
    transpose of a push = the pull of the next order

Cotangents and tangents are of floating and complex arrays alone; those of integers are zero, as JAX has it (float0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering  # private, see `_over_devices`
from jax._src.interpreters.ad import primitive_linearizations  # private: JAX has no public one (0.10)
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polybridge.backends.jax import convert
from polybridge.backends.jax.operations import TOKEN, Operation, differentiable
from polybridge.core import tokens
from polybridge.core.callbacks import as_caller
from polybridge.core.errors import CompilationError, NotDifferentiableError, OutputError
from polybridge.core.specs import TensorSpec, dtype

Tensor = Any
Counts = tuple[int, ...]
"""How many cotangents each order takes."""
_UNROLLED = 64  # rows of a batch that are traced one by one; longer batches become a loop

evaluate_p = Primitive("polybridge_evaluate")
pull_p = Primitive("polybridge_pull")
push_p = Primitive("polybridge_push")
for _primitive in (evaluate_p, pull_p, push_p):
    _primitive.multiple_results = True
    prim_requires_devices_during_lowering.add(_primitive)


def evaluate(operation: Operation, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of an operation."""
    return _bind(evaluate_p, xs, operation=operation, keep=False, rows=())


def _grouped(operation: Operation, inputs: int, counts: Counts, args: Sequence[Any]) -> _Arguments:
    """Return the arguments of a pull or a push."""
    (token, *xs), rest = args[: 1 + inputs], list(args[1 + inputs :])
    cts = []
    for count in counts:
        cts.append(rest[:count])
        rest = rest[count:]
    return _Arguments(operation, token, xs, cts, rest)


class _Arguments(NamedTuple):
    """The arguments of a pull or, with tangents, of a push; as arrays or as their types."""

    operation: Operation
    token: Any
    xs: list[Any]
    cts: list[list[Any]]
    tangents: list[Any]

    @property
    def values(self) -> list[Any]:
        """What a pull is a function of: the floating inputs and all cotangents."""
        return [*(self.xs[i] for i in differentiable(self.xs)), *(ct for group in self.cts for ct in group)]

    @property
    def outputs(self) -> list[Any]:
        """The types of what a pull returns, and of what a push does."""
        if self.cts:
            return [_aval(v) for v in self.values[: len(self.values) - len(self.cts[-1])]]
        plan = self.operation.plan(list(map(_aval, self.xs)))
        return [_type(spec, self.xs) for spec, d in zip(plan.specs, plan.differentiable, strict=True) if d]

    def pull(self, *cts: Sequence[Any]) -> list[Any]:
        """Pull back with the cotangents of further orders."""
        return self._apply(pull_p, [*self.cts, *cts], [])

    def push(self, tangents: Sequence[Any]) -> list[Any]:
        """Push tangents of the values forward."""
        return self._apply(push_p, self.cts, tangents)

    def along(self, moving: _Arguments) -> list[Any]:
        """Return the tangents of the values, of what moves in `moving`, where that of an integer is none."""
        return [*(moving.xs[i] for i in differentiable(self.xs)), *(t for group in moving.cts for t in group)]

    def _apply(self, primitive: Primitive, groups: Sequence[Sequence[Any]], tangents: Sequence[Any]) -> list[Any]:
        args = [self.token, *self.xs, *(ct for group in groups for ct in group), *tangents]
        counts = tuple(map(len, groups))
        return _bind(primitive, args, operation=self.operation, inputs=len(self.xs), counts=counts)

    def double(self) -> _Arguments:
        """Return the pull, two orders up, that a push is a part of; see `core.orders.push`."""
        ones = _ones(self.outputs)
        return _Arguments(self.operation, self.token, self.xs, [*self.cts, ones, self.tangents], [])


def _ones(types: Sequence[Any]) -> list[jax.Array]:
    return [jnp.ones(aval.shape, aval.dtype) for aval in types]


def _aval(x: Any) -> Any:
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def _type(spec: TensorSpec, inputs: Sequence[Any]) -> ShapedArray:
    return _like(inputs, spec.shape, dtype(convert.narrowed_dtype(spec.dtype)))


def _like(inputs: Sequence[Any], shape: Sequence[int | None] | None, dtype: Any) -> ShapedArray:
    """Return the type of a result: over a mesh of devices it is whole on each, and varies where an input does."""
    assert shape is not None
    types = list(map(_aval, inputs))
    meshed = next((t for t in types if not t.sharding.mesh.empty), None)
    if meshed is None:
        return ShapedArray(shape, dtype)
    return meshed.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=meshed.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        manual_axis_type=type(meshed.mat)(varying=_varying(types)),
    )


def _varying(types: Sequence[Any]) -> frozenset[Any]:
    """Return the axes of the mesh of a `jax.shard_map` along which some of the arrays differ."""
    return frozenset().union(*(t.mat.varying for t in types))


def _numbers(args: Sequence[Any]) -> list[Any]:
    """Return Python's numbers as arrays; JAX lets them through as primals and tangents."""
    return [x if hasattr(x, "shape") or type(x) is ad.Zero else jnp.asarray(x, getattr(x, "dtype", None)) for x in args]


def _bind(primitive: Primitive, args: Sequence[Any], **params: Any) -> list[Any]:
    """Bind a primitive to arguments that vary along the same axes, as all operations of JAX have to."""
    args = _numbers(args)
    types = list(map(_aval, args))
    axes = _varying(types)
    if axes:
        args = [jax.lax.pcast(x, tuple(axes - t.mat.varying), to="varying") for x, t in zip(args, types, strict=True)]
    found: list[Any] = primitive.bind(*args, **params)
    return found


# Evaluation now, and types.


def _arrays(args: Sequence[Any]) -> list[jax.Array]:
    """Return arrays; constants of a trace may be of a type of JAX's own around NumPy."""
    return [x if hasattr(x, "is_deleted") else jnp.asarray(x) for x in args]


@evaluate_p.def_impl
def _evaluate_now(*xs: Any, operation: Operation, keep: bool, rows: tuple[int, ...]) -> list[Any]:
    return convert.looked_at(operation.evaluate(_arrays(xs), keep, rows), operation.call)


@evaluate_p.def_abstract_eval
def _evaluate_type(*xs: Any, operation: Operation, keep: bool, rows: tuple[int, ...]) -> list[ShapedArray]:
    token = [_like(xs, (*rows, 2 * tokens.SIZE), TOKEN)] if keep else []
    types = [_type(spec, xs) for spec in operation.plan(xs).specs]
    operation.of(xs, types)
    return [*types, *token]


@pull_p.def_impl
def _pull_now(*args: Any, operation: Operation, inputs: int, counts: Counts) -> list[Any]:
    given = _grouped(operation, inputs, counts, _arrays(args))
    return convert.looked_at(operation.pull(given.token, given.xs, given.cts), operation.call)


@push_p.def_impl
def _push_now(*args: Any, operation: Operation, inputs: int, counts: Counts) -> list[Any]:
    given = _grouped(operation, inputs, counts, _arrays(args))
    if not counts:
        found = operation.push(given.token, given.xs, _ones(given.outputs), given.tangents)
    else:
        up = given.double()
        found = operation.pull(up.token, up.xs, up.cts)[len(given.tangents) :]
    return convert.looked_at(found, operation.call)


@pull_p.def_abstract_eval
@push_p.def_abstract_eval
def _derivative_type(*args: Any, operation: Operation, inputs: int, counts: Counts) -> list[ShapedArray]:
    given = _grouped(operation, inputs, counts, args)
    varying = _varying(list(map(_aval, args)))
    return [t.update(weak_type=False, manual_axis_type=type(t.mat)(varying=varying)) for t in given.outputs]


# Differentiation.


def _evaluate_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], operation: Operation, keep: bool, rows: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    tangents = _numbers(tangents)
    moving = [type(t) is not ad.Zero for t in tangents]
    found, _, residuals, push = _evaluate_linearized(False, moving, *primals, operation=operation, keep=keep, rows=rows)
    return found, push(residuals, *tangents)


def _evaluate_linearized(
    _: bool, moving: Sequence[bool], *primals: Any, operation: Operation, keep: bool, rows: tuple[int, ...]
) -> tuple[list[Any], list[bool], list[Any], Callable[..., list[Any]]]:
    """Return the results, which of them have a tangent, and the residuals and function that give it.

    Without this, JAX traces the rule above to find out at every `jax.vjp`, for a third of its time.
    """
    primals = tuple(_numbers(primals))
    *leaves, token = evaluate_p.bind(*primals, operation=operation, keep=True, rows=rows)
    if not leaves:
        structure = operation.plan(list(map(_aval, primals))).structure
        raise OutputError.no_tensor(operation.call, None if structure is None else structure.rebuild([]))
    operation = operation.of(primals, leaves)
    found = [*leaves, token] if keep else leaves
    wanted, outputs = differentiable(primals), differentiable(leaves)
    moved = [False] * len(found)
    if any(moving[i] for i in wanted):
        for i in outputs:
            moved[i] = True
    types = [jax.typeof(y).to_tangent_aval() for y in found]

    def push(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        zeros: list[Any] = list(map(ad.Zero, types))
        if any(moved):
            token, *xs = residuals
            given = [ad.instantiate_zeros(tangents[i]) for i in wanted]
            for i, tangent in zip(outputs, _Arguments(operation, token, xs, [], []).push(given), strict=True):
                zeros[i] = tangent
        return zeros

    return found, moved, [token, *primals], push


def _pull_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    primals, tangents = _numbers(primals), _numbers(tangents)
    found = pull_p.bind(*primals, **params)
    given, moving = _grouped(args=primals, **params), _grouped(args=tangents, **params)
    return found, given.push(list(map(ad.instantiate_zeros, given.along(moving))))


def _push_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    primals, tangents = _numbers(primals), _numbers(tangents)
    found = push_p.bind(*primals, **params)
    given, moving = _grouped(args=primals, **params), _grouped(args=tangents, **params)
    along = given.along(moving)
    sums: list[Any] = []
    if not all(type(t) is ad.Zero for t in moving.tangents):
        sums.append(given.push(list(map(ad.instantiate_zeros, moving.tangents))))
    if not all(type(t) is ad.Zero for t in along):
        up = given.double()
        still = [jnp.zeros(v.shape, v.dtype) for v in up.values[len(along) :]]
        sums.append(up.push([*map(ad.instantiate_zeros, along), *still])[len(along) :])
    if not sums:
        return found, [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in found]
    return found, [sum(parts[1:], start=parts[0]) for parts in zip(*sums, strict=True)]


def _evaluate_transpose(_: Sequence[Any], *__: Any, operation: Operation, **___: Any) -> list[Any]:
    raise NotDifferentiableError.transposed(operation.call)


def _push_transpose(cts: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    given = _grouped(args=args, **params)
    found = given.pull(list(map(ad.instantiate_zeros, cts)))
    linear = [x if ad.is_undefined_primal(t) else None for x, t in zip(found, given.tangents, strict=True)]
    return [*[None] * (len(args) - len(linear)), *linear]


def _pull_transpose(cts: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    """A pull is linear in its last cotangents, and the push of the order below is its transpose."""
    given = _grouped(args=args, **params)
    below = _Arguments(given.operation, given.token, given.xs, given.cts[:-1], [])
    found = below.push(list(map(ad.instantiate_zeros, cts)))
    linear = [x if ad.is_undefined_primal(ct) else None for x, ct in zip(found, given.cts[-1], strict=True)]
    return [*[None] * (len(args) - len(linear)), *linear]


ad.primitive_jvps.update({evaluate_p: _evaluate_jvp, pull_p: _pull_jvp, push_p: _push_jvp})
primitive_linearizations[evaluate_p] = _evaluate_linearized
ad.primitive_transposes.update({evaluate_p: _evaluate_transpose, pull_p: _pull_transpose, push_p: _push_transpose})


# Batching.


def _evaluate_batch(
    args: Sequence[Any], dims: Sequence[int | None], operation: Operation, keep: bool, rows: tuple[int, ...]
) -> tuple[list[Any], list[int]]:
    size = _size(args, dims)
    if not size:
        types = _evaluate_type(*_examples(args, dims), operation=operation, keep=keep, rows=rows)
        return _empty(types), [0] * len(types)
    # Where somebody differentiates inside of the batch, each example has a derivative also in what they share.
    spread = [d is not None or (keep and convert.is_differentiable(x)) for x, d in zip(args, dims, strict=True)]
    moved = [_first(x, d, size) if s else x for x, d, s in zip(args, dims, spread, strict=True)]
    over_batch = operation.batched(tuple(0 if s else None for s in spread))
    found = evaluate_p.bind(*moved, operation=over_batch, keep=keep, rows=(size, *rows) if keep else ())
    return found, [0] * len(found)


def _derivative_batch(
    primitive: Primitive,
    args: Sequence[Any],
    dims: Sequence[int | None],
    operation: Operation,
    inputs: int,
    counts: Counts,
) -> tuple[list[Any], list[int]]:
    size = _size(args, dims)
    if not size:
        types = _derivative_type(*_examples(args, dims), operation=operation, inputs=inputs, counts=counts)
        return _empty(types), [0] * len(types)
    if dims[0] is not None:  # one evaluation of the whole batch
        spread = [d is not None or convert.is_differentiable(x) for x, d in zip(args, dims, strict=True)]
        moved = [_first(x, d, size) if s else x for x, d, s in zip(args, dims, spread, strict=True)]
        axes = tuple(0 if s else None for s in spread[1 : 1 + inputs])
        found = primitive.bind(*moved, operation=operation.batched(axes), inputs=inputs, counts=counts)
        return found, [0] * len(found)

    def example(row: Any) -> list[Any]:
        given = [
            x if d is None else jax.lax.dynamic_index_in_dim(x, row, d, False) for x, d in zip(args, dims, strict=True)
        ]
        found: list[Any] = primitive.bind(*given, operation=operation, inputs=inputs, counts=counts)
        return found

    if size > _UNROLLED and any(isinstance(x, jax.core.Tracer) for x in args):
        found = jax.lax.map(example, jnp.arange(size))
    else:
        rows = [example(row) for row in range(size)]  # a `map` would end where the user's function raises StopIteration
        found = list(map(jnp.stack, zip(*rows, strict=True)))
    return found, [0] * len(found)


def _examples(args: Sequence[Any], dims: Sequence[int | None]) -> list[ShapedArray]:
    """Return the types of one example of a batch."""
    types = map(_aval, args)
    return [t if d is None else ShapedArray(np.delete(t.shape, d), t.dtype) for t, d in zip(types, dims, strict=True)]


def _empty(types: Sequence[ShapedArray]) -> list[Any]:
    """Return results like these of a batch of no examples."""
    return [jnp.zeros((0, *t.shape), t.dtype) for t in types]


def _size(args: Sequence[Any], dims: Sequence[int | None]) -> int:
    size: int = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return size


def _first(x: Any, axis: int | None, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


batching.primitive_batchers[evaluate_p] = _evaluate_batch
batching.primitive_batchers[pull_p] = partial(_derivative_batch, pull_p)
batching.primitive_batchers[push_p] = partial(_derivative_batch, push_p)


# Compilation.


def _lower(primitive: Primitive, on_host: Callable[..., Callable[..., None]], is_pure: bool) -> None:
    """Register a lowering to a call into Python on the memory of XLA.

    What may be random is marked as having an effect: XLA would otherwise take it out of a loop. JAX itself is not told
    of the effect, since it would refuse it in `jax.checkpoint`. A program over several devices calls Python once, with
    whole arrays, which XLA allows to JAX's older callbacks only (JAX 0.10); in `jax.shard_map` each device does.
    """

    def rule(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        operation: Operation = params["operation"]
        if ctx.module_context.lowering_parameters.for_export:
            raise CompilationError.in_export(operation.call)
        caller, run = as_caller(operation.relay.exchange.source), on_host(ctx.avals_in, **params)

        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]

        def over_buffers(_: Any, outs: Sequence[Any], *buffers: Any) -> None:
            caller(run, buffers, outs)

        def over_arrays(*arrays: Any) -> list[Any]:
            outs = [np.empty(t.shape, t.dtype) for t in types]
            caller(run, arrays, outs)
            return outs

        context = ctx.module_context.axis_context
        if isinstance(context, mlir.SPMDAxisContext) and context.manual_axes != set(context.mesh.axis_names):
            raise CompilationError.over_some_axes(operation.call)
        if isinstance(context, mlir.ShardingContext) and context.num_devices > 1:
            callback = partial(jax.pure_callback if is_pure else io_callback, over_arrays, types)
            call = _over_devices(callback, operation, context)
        else:
            call = buffer_callback(over_buffers, types, has_side_effect=not is_pure)
        return mlir.lower_fun(call, multiple_results=True)(ctx, *args)

    mlir.register_lowering(primitive, rule)


def _over_devices(callback: Callable[..., Any], operation: Operation, context: Any) -> Callable[..., Any]:
    """Return a call for a program over several devices: whole arrays go in and come out, on each of the devices.

    Without saying so, results would be where the call was, and JAX refuses to compute with them and others eagerly.
    Private: a lowering does not know its devices unless its primitive is in a set of JAX's own (JAX 0.10).

    Raises:
        CompilationError: the devices belong to several processes; XLA would call that of the first process alone.
    """
    if len({device.process_index for device in context.device_assignment}) > 1:
        raise CompilationError.over_processes(operation.call)
    everywhere = NamedSharding(Mesh(np.array(context.device_assignment), "devices"), PartitionSpec())

    def whole(arrays: Sequence[Any]) -> list[Any]:
        return [x if _is_explicit(x) else jax.lax.with_sharding_constraint(x, everywhere) for x in arrays]

    return lambda *args: whole(callback(*whole(args)))


def _is_explicit(x: Any) -> bool:
    """Whether the type of an array says where its parts are."""
    return AxisType.Explicit in _aval(x).sharding.mesh.axis_types


def _evaluation(xs: Sequence[Any], operation: Operation, keep: bool, rows: tuple[int, ...]) -> Callable[..., None]:
    wanted = differentiable(xs)
    return partial(operation.evaluate_on_host, operation.plan(xs), wanted, operation.owner(xs, wanted), keep)


def _pulling(args: Sequence[Any], operation: Operation, inputs: int, counts: Counts) -> Callable[..., None]:
    conversions = operation.conversions(args[1 : 1 + inputs], len(counts))
    wanted = differentiable(args[1 : 1 + inputs])
    ends = list(accumulate(counts, initial=1 + inputs))
    groups = [slice(*span) for span in pairwise(ends)]

    def run(buffers: Sequence[Any], outs: Sequence[Any]) -> None:
        cts = list(map(buffers.__getitem__, groups))
        operation.pull_on_host(conversions, wanted, buffers[0], buffers[1 : 1 + inputs], cts, outs)

    return run


def _pushing(args: Sequence[Any], operation: Operation, inputs: int, counts: Counts) -> Callable[..., None]:
    conversions = operation.conversions(args[1 : 1 + inputs], len(counts) + 2)
    types = _grouped(operation, inputs, counts, args)
    wanted = differentiable(types.xs)
    plan = operation.plan(args[1 : 1 + inputs])
    results = [spec for spec, d in zip(plan.specs, plan.differentiable, strict=True) if d]
    ones = [np.ones(aval.shape, aval.dtype) for aval in types.outputs]
    of_source = [np.ones(one.shape, dtype(spec.dtype)) for one, spec in zip(ones, results, strict=False)]

    def run(buffers: Sequence[Any], outs: Sequence[Any]) -> None:
        given = _grouped(operation, inputs, counts, buffers)
        if not counts:
            operation.push_on_host(wanted, given.token, given.xs, of_source, given.tangents, outs)
            return
        unread = [None] * len(given.tangents)
        cts = [*given.cts, ones, given.tangents]
        operation.pull_on_host(conversions, wanted, given.token, given.xs, cts, [*unread, *outs])

    return run


_lower(evaluate_p, _evaluation, is_pure=False)
_lower(pull_p, _pulling, is_pure=True)
_lower(push_p, _pushing, is_pure=True)


def _without_unread_token(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """Keep no residual where no derivative asks for it, and run nothing where nobody reads the results."""
    if not any(used):
        return [False] * len(equation.invars), None
    if equation.params["keep"] and not used[-1]:
        params = {**equation.params, "keep": False, "rows": ()}
        equation = equation.replace(params=params, outvars=equation.outvars[:-1])
    return [True] * len(equation.invars), equation


pe.dce_rules[evaluate_p] = _without_unread_token
