"""How JAX evaluates and differentiates its own functions: compiled once a signature, as they are if they cannot be.

A derivative of any order is the derivative of a pure function, and JAX's functions are pure: the pullback of order n is
differentiated by differentiating, inside one compiled function, all that led to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from polybridge.backends.jax import convert
from polybridge.core.abstract import Abstract, Evaluation
from polybridge.core.backend import Backend, Context, Pullback
from polybridge.core.errors import UntracedWarning, warn
from polybridge.core.evaluator import Evaluator, Run
from polybridge.core.programs import Results
from polybridge.core.specs import TensorSpec

Tensor = Any
Tree = Any

_UNTRACEABLE = (  # what JAX raises where a function asks for the values of what it is traced with
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_TRACES = 256  # signatures for which one function keeps what is static of its results
_STAGES = 64  # sets of inputs to differentiate by, for which one program keeps what it has compiled


class CompilingEvaluator(Evaluator):
    """Compiles a program with its residuals, and its pullback, for each signature that it meets."""

    def __init__(self, source: Backend, run: Run, run_on_copies: Run) -> None:
        """Compile nothing yet."""
        super().__init__(source, run, run_on_copies)
        self._mode = _Mode()
        self._stages: dict[tuple[int, ...], _Stage] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Run the program, compiled."""
        return self.vjp(inputs, ())[0]

    def vjp(
        self, inputs: Sequence[Tensor], wanted: Sequence[int], call: _Call | None = None
    ) -> tuple[Results, Pullback]:
        """Run the program with its residuals, compiled; by `_later` at specs in place of arrays."""
        wanted = tuple(wanted)
        stage = self._stages.get(wanted) or self._stage(wanted)
        call, inputs = call or _now, tuple(inputs)
        handed, kept, trace = call(stage.forward, *inputs)
        found, (differentiable, structure) = list(handed), trace.rest
        if not all(differentiable):
            outputs = sum(differentiable)  # which come first
            following, rest = iter(found[:outputs]), iter(found[outputs:])
            found = [next(following if d else rest) for d in differentiable]
        return Results(found, differentiable, structure), _StagePullback(stage, call, trace, inputs, kept)

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation from a trace, which later evaluations use too."""
        inputs = [jax.ShapeDtypeStruct(spec.shape, convert.narrowed_dtype(spec.dtype)) for spec in specs]
        try:
            results, pullback = self.vjp(inputs, wanted, _later)
        except _UNTRACEABLE:
            return super().abstract(specs, wanted)
        found = list(map(convert.spec, results.tensors))
        outputs: list[Tensor | None] = list(results.take_outputs())
        evaluation = Evaluation(pullback, outputs, tuple(range(len(wanted))), contextlib.nullcontext)
        return Abstract(found, results.differentiable, results.structure, evaluation)

    def _stage(self, wanted: tuple[int, ...]) -> _Stage:
        fn, split = functools.partial(self._program, wanted), functools.partial(_split, wanted)
        stage = self._stages.setdefault(wanted, _Stage(fn, split, self._mode))
        while len(self._stages) > _STAGES:
            self._stages.pop(next(iter(self._stages)), None)
        return stage

    def _program(self, wanted: tuple[int, ...], constants: Tree, primals: Tree) -> tuple[Tree, _Packed]:
        inputs = list(constants)
        for i, x in zip(wanted, primals, strict=True):
            inputs[i] = x
        results = self._run(inputs)
        outputs = tuple(results.take_outputs())
        rest = tuple(x for x in results.tensors if x is not None)
        return outputs, (rest, (), (results.differentiable, results.structure))


def vjp(fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
    """Evaluate `fn` as it is, and return its outputs beside the pullback."""

    def program(constants: Tree, primals: Tree) -> tuple[Tree, _Packed]:
        return tuple(fn(*primals)), ((), (), None)

    stage, inputs = _Stage(program, lambda inputs: ((), inputs), _Mode(eager=True)), tuple(primals)
    outputs, kept, trace = stage.forward(*inputs)
    return outputs, _StagePullback(stage, _now, trace, inputs, kept)


def vmap(fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
    """Return `fn` over batches."""
    mapped: Callable[..., Sequence[Tensor]] = jax.vmap(lambda *xs: tuple(fn(*xs)), in_axes=tuple(axes))
    return mapped


def needs_values(error: Exception) -> bool:
    """Whether a function has asked for values that tracers do not have."""
    return isinstance(error, _UNTRACEABLE)


def _split(wanted: Sequence[int], inputs: Sequence[Tensor]) -> tuple[Tree, Tree]:
    """Return the inputs with None for the wanted ones, and these."""
    return tuple(None if i in wanted else x for i, x in enumerate(inputs)), tuple(inputs[i] for i in wanted)


_Packed = tuple[Tree, Tree, Any]
"""What a function returns: arrays for its caller, arrays to keep, and what is known of them."""


class _Mode:
    """Whether what belongs to one program is compiled, or run as it is."""

    __slots__ = ("eager",)

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager

    def fall_back(self, error: Exception) -> None:
        if not self.eager:
            self.eager = True
            warn(UntracedWarning.reading(_user_line(error), type(error).__name__))


class _Compiled:
    """A function of arrays that returns `_Packed`, compiled, or run as it is if JAX cannot trace it.

    JAX keeps the tree of a result in caches of the process, and all that is static in it. So what is static stays here,
    under a number that is in the tree: `{number: (handed, kept)}`.
    """

    def __init__(self, fn: Callable[..., _Packed], mode: _Mode) -> None:
        self._fn, self._mode = fn, mode
        self._statics: dict[int | None, Any] = {None: None}

    @functools.cached_property
    def _jitted(self) -> Any:
        def numbered(*args: Tree) -> dict[int | None, tuple[Tree, Tree]]:
            if jax.config.jax_disable_jit and not convert.is_tracing():  # JAX calls this itself then
                return {_NOT_COMPILED: (self._as_it_is(args), ())}
            handed, kept, static = self._fn(*args)
            number = None if static is None else next(_numbers)
            self._statics[number] = static
            while len(self._statics) > _TRACES + 1:
                self._statics.pop(list(self._statics)[1], None)  # after None
            return {number: (handed, kept)}

        return jax.jit(numbered)  # a new function: JAX's cache knows it not

    def __call__(self, *args: Tree) -> _Packed:
        """Evaluate it now."""
        if self._mode.eager:
            return self._as_it_is(args)
        if convert.is_tracing():  # something else is being traced, around the call
            with jax.core.eval_context():
                return self(*args)
        try:
            ((number, (handed, kept)),) = self._jitted(*args).items()
        except _UNTRACEABLE as error:
            packed = self._as_it_is(args)  # raises what the user's function raises by itself
            self._mode.fall_back(error)
            return packed
        static = self._statics.get(number, _DROPPED)
        if static is _DROPPED:
            if number == _NOT_COMPILED:
                return handed
            self.__dict__.pop("_jitted", None)
            return self(*args)
        convert.own(handed)
        return handed, kept, static

    def later(self, *args: Tree) -> _Packed:
        """Trace it, with specs in place of arrays."""
        ((number, (handed, kept)),) = self._jitted.eval_shape(*args).items()
        static = self._statics.get(number, _DROPPED)
        if static is _DROPPED:
            self.__dict__.pop("_jitted", None)
            return self.later(*args)
        return handed, kept, static

    def _as_it_is(self, args: Tree) -> _Packed:
        # The caller may write to its memory as soon as it has the results, while residuals are still being computed.
        packed = self._fn(*args)
        jax.block_until_ready(packed[:2])
        return packed


_DROPPED = object()  # what is static of a trace that was made too long ago; it has to be traced anew
_NOT_COMPILED = -1  # in place of a number, where JAX runs a function as it is; what is static is handed over with it
_numbers = itertools.count()
_Call = Callable[..., _Packed]
_now, _later = _Compiled.__call__, _Compiled.later


class _Stage:
    """A pure function of any order, evaluated with its residuals.

    Args:
        fn: from constants and primals (trees in which None is what is not there) to its outputs and a `_Packed` of
            what it returns besides.
        split: finds both in the inputs of an evaluation; called when these are traced.
        mode: of the program that it comes from.
    """

    def __init__(
        self,
        fn: Callable[[Tree, Tree], tuple[Tree, _Packed]],
        split: Callable[[Sequence[Tree]], tuple[Tree, Tree]],
        mode: _Mode,
    ) -> None:
        self._fn, self._split, self._mode = fn, split, mode
        self.forward = _Compiled(self._with_residuals, mode)

    @functools.cached_property
    def derivative(self) -> _Stage:
        """The pullback as a function of the inputs and the cotangents, differentiated by the primals and these."""

        def split(inputs: Sequence[Tree]) -> tuple[Tree, Tree]:
            constants, primals = self._split(inputs[0])
            return constants, (primals, inputs[1])

        return _Stage(self._pulled, split, self._mode)

    def _with_residuals(self, *inputs: Tree) -> _Packed:
        constants, primals = self._split(inputs)
        outputs, pull, (rest, _, static) = jax.vjp(functools.partial(self._fn, constants), primals, has_aux=True)
        leaves, treedef = jax.tree.flatten(pull)
        given = {id(x): i for i, x in enumerate(jax.tree.leaves(inputs))}
        places = [given.get(id(leaf)) for leaf in leaves]
        kept = tuple(leaf for leaf, place in zip(leaves, places, strict=True) if place is None)
        return (*outputs, *rest), kept, _Trace(treedef, places, outputs, static, self._mode)

    def _pulled(self, constants: Tree, inputs: Tree) -> tuple[Tree, _Packed]:
        primals, cts = inputs
        outputs, pull, _ = jax.vjp(functools.partial(self._fn, constants), primals, has_aux=True)
        return _pull(pull, _specs(outputs), cts), ((), (), None)


class _Trace:
    """What is known of one trace of a stage.

    Args:
        treedef: of JAX's own pullback, a tree of residuals.
        places: for each residual which of the given arrays it is; None for one that the stage returned.
        outputs: of the stage.
        rest: what is static of what the stage returns besides.
        mode: of the program.
    """

    def __init__(self, treedef: Any, places: list[int | None], outputs: Tree, rest: Any, mode: _Mode) -> None:
        self._treedef, self._places, self.outputs, self.rest = treedef, places, _specs(outputs), rest
        self.pull = _Compiled(self._pull, mode)

    def _pull(self, inputs: Tree, kept: Tree, cts: Tree) -> _Packed:
        given, own = jax.tree.leaves(inputs), iter(kept)
        residuals = [next(own) if place is None else given[place] for place in self._places]
        return _pull(jax.tree.unflatten(self._treedef, residuals), self.outputs, cts), (), None


class _StagePullback(Pullback):
    """The pullback of a stage: its trace, with the arrays."""

    def __init__(self, stage: _Stage, call: _Call, trace: _Trace, inputs: Sequence[Tree], kept: Tree) -> None:
        self._stage, self._call, self._trace, self._inputs, self._kept = stage, call, trace, inputs, kept
        self._wide = jax.enable_x64.value

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Pull back, compiled."""
        if jax.enable_x64.value is not self._wide:
            with self._precision():
                return self(cts)
        return self._call(self._trace.pull, self._inputs, self._kept, tuple(cts))[0]

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        """Evaluate the derivative's stage."""
        stage, inputs = self._stage.derivative, (self._inputs, tuple(cts))
        with self._precision():
            found, kept, trace = self._call(stage.forward, *inputs)
            return found, _StagePullback(stage, self._call, trace, inputs, kept)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward, as far as the residuals depend on it."""
        return jax.enable_x64(self._wide)


def _specs(outputs: Tree) -> Tree:
    return tuple(None if y is None else jax.ShapeDtypeStruct(y.shape, y.dtype) for y in outputs)


def _pull(pull: Callable[[Tree], Tree], outputs: Tree, cts: Tree) -> Tree:
    """Return the cotangents of all primals as one tuple, None for what no cotangent influences.

    The convention is the contract's, torch's and TensorFlow's: at y = f(z), conj(f'(z)) * ct. JAX's is f'(z) * ct.
    """

    def pulled(cts: Tree) -> Tree:
        filled = tuple(
            None if y is None else jnp.zeros(y.shape, y.dtype) if ct is None else _conj(ct.astype(y.dtype))
            for ct, y in zip(cts, outputs, strict=True)
        )
        (found,) = pull(filled)
        return tuple(None if x is None else _conj(x) for x in jax.tree.leaves(found, is_leaf=lambda x: x is None))

    try:
        closed, shapes = jax.make_jaxpr(pulled, return_shape=True)(cts)
    except _UNTRACEABLE:  # a derivative that the user wrote, and that reads values
        return pulled(cts)
    found = jaxpr_as_fun(closed)(*jax.tree.leaves(cts))
    influenced = _influenced(closed.jaxpr, [True] * len(closed.jaxpr.invars))
    connected = [x if is_influenced else None for x, is_influenced in zip(found, influenced, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), connected)


def _conj(x: Tensor) -> Tensor:
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


def _influenced(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each result whether one of these inputs influences it. In a loop, each influences each result."""
    reached = {var for var, is_reached in zip(jaxpr.invars, inputs, strict=True) if is_reached}

    def is_reached(var: Any) -> bool:
        return not isinstance(var, Literal) and var in reached

    for equation in jaxpr.eqns:
        given = list(map(is_reached, equation.invars))
        if any(given):
            inner = _called(equation)
            results = [True] * len(equation.outvars) if inner is None else _influenced(inner, given)
            reached.update(var for var, r in zip(equation.outvars, results, strict=True) if r)
    return list(map(is_reached, jaxpr.outvars))


def _called(equation: Any) -> Jaxpr | None:
    """Return what an equation calls, where it is a plain call."""
    name = _CALLS.get(equation.primitive.name)
    inner = equation.params.get(name)
    return getattr(inner, "jaxpr", inner)


_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def _user_line(error: Exception) -> str:
    """Return the last line of the traceback that is neither polybridge's nor a library's."""
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


_LIBRARIES = ("jax", "numpy", "polybridge")


def state() -> Context:
    """Capture what JAX keeps per thread."""
    captured = {name: getattr(jax.config, name) for name in _STATE}

    @contextlib.contextmanager
    def entered() -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in captured.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_STATE[name](value))
            yield

    return entered


_STATE = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
}
