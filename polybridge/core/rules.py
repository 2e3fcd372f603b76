"""Derivatives that the caller of `wrap` gives instead of the source's own, in the form of `jax.custom_vjp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from polybridge.core.abstract import Abstract
from polybridge.core.backend import Backend, NoPullback, Pullback, Replayed, spread
from polybridge.core.differences import Differences, Function, Space
from polybridge.core.errors import MutationError, NotDifferentiableError, OutputError, UnsupportedTensorError
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Lent, Results, UserFunction
from polybridge.core.specs import TensorSpec, dtype
from polybridge.core.trees import flatten, unflatten

Tensor = Any
Vjp = tuple[Callable[..., Any], Callable[..., Any]] | Literal["finite-difference"] | None
"""What `wrap` takes as `vjp=`."""


@dataclass(frozen=True)
class Rule:
    """How a function is differentiated; with nothing given, it is not.

    Args:
        fwd: `fwd(*args, **kwargs)` returns `(out, residuals)`.
        bwd: `bwd(residuals, ct)` returns a tuple of cotangents, one for each argument.
        differences: whether by finite differences instead.
        jvp: `jvp(primals, tangents)` returns `(out, tangents_out)`.
    """

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    differences: bool = False
    jvp: Callable[..., Any] | None = None

    @classmethod
    def of(cls, vjp: Vjp, jvp: Callable[..., Any] | None) -> Rule | None:
        """Return the rule that `wrap` was given, None if it was given none.

        Raises:
            ValueError: it has another form.
        """
        if jvp is not None and not callable(jvp):
            raise ValueError(f"`polybridge.wrap` takes a callable as jvp=, got {jvp!r}.")
        if vjp is None:
            return None if jvp is None else cls(jvp=jvp)
        if vjp == "finite-difference":
            return cls(differences=True, jvp=jvp)
        if isinstance(vjp, tuple) and len(vjp) == 2 and all(map(callable, vjp)):
            fwd, bwd = vjp
            return cls(fwd, bwd, jvp=jvp)
        raise ValueError(
            f'`polybridge.wrap` takes vjp=(fwd, bwd), a pair of callables, or vjp="finite-difference", got {vjp!r}.'
        )


class RuledFunction(UserFunction):
    """The user's function with a rule for its derivative."""

    vectorises = False

    def __init__(self, rule: Rule, *function: Any) -> None:
        """Take the rule before what `UserFunction` takes."""
        super().__init__(*function)
        self.rule = rule

    def evaluator(self, lent: Lent, copied: Lent) -> Evaluator:
        """Return an evaluator that obeys the rule."""
        return RuleEvaluator(self, lent, copied)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Results, Any]:
        """Run `fwd`, and return its results beside the residuals."""
        assert self.rule.fwd is not None
        args, kwargs = self._structure.rebuild(inputs)
        returned = self.rule.fwd(*args, **kwargs)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise OutputError.of_rule(self.call, "`fwd` returned", f"{_said(returned)}, not (out, residuals)")
        return self._results(returned[0]), returned[1]

    def backward(self, residuals: Any, results: Results, cts: Sequence[Tensor | None]) -> list[Any]:
        """Run `bwd`, and return a cotangent for each input.

        Args:
            residuals: of `fwd`.
            results: of `fwd`, for their structure.
            cts: one for each differentiable result.
        """
        assert self.rule.bwd is not None
        outputs = [i for i, is_output in enumerate(results.differentiable) if is_output]
        returned = self.rule.bwd(residuals, results.structure.like(spread(cts, outputs, len(results.differentiable))))
        count, named = self._structure.arity()
        if not isinstance(returned, tuple):
            raise OutputError.of_rule(self.call, "`bwd` returned", f"{_said(returned)}, not a tuple of cotangents")
        if len(returned) != count + named:
            also = " and a dict of those of its keyword arguments" if named else ""
            wanted = f"one for each of {count} positional arguments{also}"
            raise OutputError.of_rule(self.call, "`bwd` returned", f"{len(returned)} cotangents, not {wanted}")
        try:
            return self._structure.unlike((returned[:count], returned[count] if named else None))
        except ValueError as error:
            raise OutputError.of_rule(self.call, "`bwd` returned", f"no tree like the arguments: {error}") from error

    def push(self, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Results, list[Any]]:
        """Run `jvp`, and return its results beside a tangent for each of them."""
        assert self.rule.jvp is not None
        args, kwargs = self._structure.rebuild(inputs)
        if kwargs:
            raise NotDifferentiableError.keywords(self.call, kwargs)
        returned = self.rule.jvp(args, self._structure.like(tangents)[0])
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise OutputError.of_rule(self.call, "`jvp` returned", f"{_said(returned)}, not (out, tangents_out)")
        results = self._results(returned[0])
        try:
            return results, results.structure.unlike(returned[1])
        except ValueError as error:
            raise OutputError.of_rule(self.call, "`jvp` returned", f"no tree like the result: {error}") from error


class RuleEvaluator(Evaluator):
    """Runs the function where no derivative is wanted, and what the rule says where one is."""

    def __init__(self, program: RuledFunction, lent: Lent, copied: Lent) -> None:
        """Keep the program."""
        super().__init__(program.source, partial(lent, program), partial(copied, program))
        self._program, self._lent, self._copied = program, lent, copied
        self._writing: bool | None = None  # whether `bwd` writes to residuals, once it has shown
        self._keeping: bool | None = None  # whether `fwd` keeps them, and may write to them when it runs next
        self._probes: list[weakref.ref[Any] | None] | None = None  # the memory of those of its first run

    def vjp(self, inputs: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Results, Pullback]:
        """Run the forward half of the rule, and return the pullback that is the other half."""
        return self._ruled(inputs, wanted, self._lent)

    def vjp_on_copies(self, placeholders: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Results, Pullback]:
        """Do the same with placeholders."""
        return self._ruled(placeholders, wanted, self._copied)

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan; finite differences are not tried for it, which would cost many runs."""
        if not self._program.rule.differences:
            return super().abstract(specs, wanted)
        placeholders, running = self._source.placeholders(specs)
        with running():
            return self.plan(self._run_on_copies(placeholders))

    def _ruled(self, inputs: Sequence[Tensor], wanted: Sequence[int], lent: Lent) -> tuple[Results, Pullback]:
        rule, call = self._program.rule, self._program.call
        if wanted and rule.fwd is not None:
            results, pullback = self._by_rule(inputs, wanted, lent)
        elif wanted and rule.differences:
            results, pullback = self._by_differences(inputs, wanted, lent)
        else:
            results = self._source.run(lambda: lent(self._program, inputs))
            without, forward_only = NotDifferentiableError.without_rule, NotDifferentiableError.forward_only
            pullback = NoPullback(forward_only(call) if rule.jvp else without(call, self._source.name))
        return results, pullback if rule.jvp is None else _Pushed(pullback, partial(self._push, inputs, wanted))

    def _by_rule(self, inputs: Sequence[Tensor], wanted: Sequence[int], lent: Lent) -> tuple[Results, Pullback]:
        """Run `fwd`. Where the source differentiates, the pullback's own derivative goes through `fwd` and `bwd`."""
        source, program = self._source, self._program
        promised = {i: (source.spec(inputs[i]), f"`bwd` returned for {program.argument(i)}") for i in wanted}

        def evaluate(primals: Sequence[Tensor]) -> tuple[Results, list[Tensor], Callable[..., list[Tensor | None]]]:
            results, residuals = lent(program.forward, _merged(inputs, wanted, primals))
            if self._keeping is None and self._probes is not None:
                self._keeping = any(probe is None or probe() is not None for probe in self._probes)
            kept = _Residuals(source, program.call, residuals, copied=self._keeping is not False)
            if self._probes is None and lent is self._lent:  # and not on placeholders
                self._probes = kept.probes(residuals)
            del residuals
            outputs = results.take_outputs()
            specs = [source.spec(y) for y in outputs]

            def call(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
                filled = _filled(source, cts, specs)
                given = kept(copied=self._writing is not False)
                found = source.run(lambda: program.backward(given, results, filled))
                if self._writing is None and lent is self._lent:  # and not on placeholders, which have no values
                    self._writing = kept.written(given)
                elif self._writing is False:
                    kept.check()
                return [self._checked(found[i], *expected) for i, expected in promised.items()]

            return results, outputs, call

        primals = [inputs[i] for i in wanted]
        results, outputs, call = source.run(lambda: evaluate(primals))
        results.put_outputs(outputs)
        if not source.derivatives:
            return results, _Once(call, NotDifferentiableError.beyond_rule(program.call, source.name))
        return results, Replayed(source, lambda primals: evaluate(primals)[1:], primals, outputs, call)

    def _by_differences(self, inputs: Sequence[Tensor], wanted: Sequence[int], lent: Lent) -> tuple[Results, Pullback]:
        """Run the function, and be ready to run it again near by."""
        source, program = self._source, self._program
        space = Space(source, [source.spec(inputs[i]) for i in wanted])
        at = space.coordinates([inputs[i] for i in wanted])
        kept = self._kept(inputs)
        results: Results = source.run(lambda: lent(program, inputs))
        outputs = [y for y, is_output in zip(results.tensors, results.differentiable, strict=True) if is_output]

        def run(primals: list[Tensor]) -> list[Tensor]:
            merged = _merged(self._kept(kept), wanted, primals)
            return source.run(lambda: program(merged).take_outputs())  # type: ignore[no-any-return]

        to = Space(source, [source.spec(y) for y in outputs])
        return results, Differences(Function(program.call, run, space, to, at))

    def _push(
        self, inputs: Sequence[Tensor], wanted: Sequence[int], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return a tangent for each differentiable result, by the rule."""
        source, program = self._source, self._program
        specs = [source.spec(x) for x in inputs]
        filled = _filled(source, spread(tangents, wanted, len(inputs)), specs)
        results, found = source.run(lambda: program.push(self._kept(inputs), filled))
        pushed = []
        for i, is_output in enumerate(results.differentiable):
            if is_output:
                where = f"`jvp` returned for {results.structure.result(i)}"
                pushed.append(self._checked(found[i], source.spec(results.tensors[i]), where))
        return pushed

    def _kept(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs for one of several runs, as copies where the function may write to them."""
        return [self._source.copy(x) for x in inputs] if self._source.writes else list(inputs)

    def _checked(self, found: Any, promised: TensorSpec, where: str) -> Any:
        """Return a cotangent or tangent, None or of the spec that it should have."""
        if found is None:
            return None
        call, source = self._program.call, self._source
        if not source.is_tensor(found):
            raise OutputError.of_rule(call, where, f"{_said(found)}, not a {source.name} tensor or None")
        if source.spec(found) != promised:
            raise OutputError.of_rule(call, where, f"{source.spec(found)} instead of {promised}")
        return found


class _Once(Pullback):
    """A pullback without a pullback."""

    def __init__(self, call: Callable[..., list[Tensor | None]], beyond: NotDifferentiableError) -> None:
        self._call, self._beyond = call, NoPullback(beyond)

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return self._call(cts)

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        return self(cts), self._beyond


class _Pushed(Pullback):
    """A pullback beside a forward mode of its own."""

    def __init__(self, reverse: Pullback, push: Callable[..., list[Tensor | None]]) -> None:
        self._reverse, self._push = reverse, push

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return self._reverse(cts)

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        return self._reverse.vjp(cts)

    def jvp(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return self._push(tangents)


class _Residuals:
    """What `fwd` has left for `bwd`, which gets it each time as it was.

    Where its framework writes in place, `fwd` may write to the same memory when it runs next, and `bwd` to what may be
    the caller's inputs, or be asked for again. So copies are kept where nobody watches, until `fwd` has shown that it
    lets go of what it returns, and `bwd` gets copies until it has shown that it does not write.
    """

    def __init__(self, source: Backend, call: str, residuals: Any, copied: bool) -> None:
        self._source, self._call = source, call
        self._leaves, self._treedef = flatten(residuals)
        self._places = [i for i, leaf in enumerate(self._leaves) if source.writes and _is_plain(source, leaf)]
        if copied and not source.counts_writes:
            self._leaves = self._copies()
        self._versions = self._seen()

    def probes(self, residuals: Any) -> list[weakref.ref[Any] | None]:
        """Return references to the memory of what `fwd` has returned, None where there can be none."""
        leaves, _ = flatten(residuals)
        return [_memory(leaves[i]) for i in self._places]

    def __call__(self, copied: bool) -> Any:
        """Return them, or copies of them.

        Raises:
            MutationError: somebody has written to them.
        """
        self.check()
        return unflatten(self._treedef, self._copies() if copied else list(map(_locked, self._leaves)))

    def check(self) -> None:
        """Raise a MutationError if somebody has written to them."""
        if self._seen() != self._versions:
            raise MutationError.residuals(self._call)

    def written(self, copies: Any) -> bool:
        """Return whether copies of them have been written to."""
        leaves, _ = flatten(copies)
        return not all(self._source.same(self._leaves[i], leaves[i]) for i in self._places)

    def _copies(self) -> list[Any]:
        leaves = list(self._leaves)
        for i in self._places:
            copy = self._source.copy(leaves[i])
            if type(copy) is type(leaves[i]):  # no scalar, and no subclass, which has to stay one
                leaves[i] = copy
        return leaves

    def _seen(self) -> list[int]:
        if not self._source.counts_writes:
            return []
        return [_version(self._source, self._leaves[i]) for i in self._places]


def _memory(leaf: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to what holds the memory of a tensor."""
    base = getattr(leaf, "base", None)
    try:
        return weakref.ref(leaf if base is None else base)
    except TypeError:
        return None


def _locked(leaf: Any) -> Any:
    """Return a view that NumPy lets nobody write to; NumPy does not count writes."""
    if type(leaf) is not np.ndarray:
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def _version(source: Backend, tensor: Tensor) -> int:
    try:
        return source.version(tensor)
    except RuntimeError:  # torch's inference tensors have none
        return 0


def _is_plain(source: Backend, leaf: Any) -> bool:
    """Whether it is a tensor that could cross: there is no copy of strings, objects or sparse tensors."""
    if not source.is_tensor(leaf):
        return False
    try:
        source.is_differentiable(leaf)
    except UnsupportedTensorError:
        return False
    return True


def _merged(inputs: Sequence[Tensor], wanted: Sequence[int], primals: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs with `primals` at the wanted positions."""
    merged = list(inputs)
    for position, value in zip(wanted, primals, strict=True):
        merged[position] = value
    return merged


def _filled(source: Backend, tensors: Sequence[Tensor | None], specs: Sequence[TensorSpec]) -> list[Tensor | None]:
    """Return the tensors with zeros instead of None where these are differentiable."""
    return [
        source.from_numpy(np.zeros(spec.shape, dtype(spec.dtype))) if x is None and spec.differentiable else x
        for x, spec in zip(tensors, specs, strict=True)
    ]


def _said(found: object) -> str:
    return f"a value of type {type(found).__name__}"
