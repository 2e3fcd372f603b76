"""The laws of derivatives: those that the framework gives as a source, and those that it takes as a destination."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polybridge.core import trees
from polybridge.core.backend import Run, Tensor, pullback_of
from polybridge.core.exchange import Exchange
from polybridge.core.programs import UserFunction
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import dtype
from polybridge.core.trees import Structure
from polybridge.core.wrapping import classifier
from polybridge.testing.subject import Array, LawError, Subject, law, require, require_close, require_same, said

Values = Sequence[Array | None]


def law_of_functions(check: Callable[[Subject, Run, list[Tensor]], None]) -> Callable[[Subject], None]:
    """Make a law of a check that is to hold for each example, given as a function and its primals.

    It holds trivially of a framework that differentiates nothing.
    """

    @functools.wraps(check)
    def checked(subject: Subject) -> None:
        for example in subject.examples if subject.backend.derivatives else ():
            try:
                check(subject, example.run, subject.given(example.primals))
            except Exception as error:
                raise LawError(f"{said(error)} This is of {example.name}.") from error

    return law(checked)


@law_of_functions
def vjp_evaluates(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """`vjp` returns what the function returns, and leaves the primals as they are."""
    before, expected = subject.values(primals), subject.values(fn(*primals))
    outputs, _ = subject.backend.vjp(fn, primals)
    _compare(subject.values(outputs), expected, "output")
    for x, was in zip(subject.values(primals), before, strict=True):
        require_same(x, was, "after vjp the primal")


@law_of_functions
def pullbacks_are_the_transposed_derivative(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """<ct, J v> equals <pullback(ct), v>, where J v is found by finite differences."""
    _check_by_differences(subject, fn, primals)


@law_of_functions
def vjp_inside_vjp_is_differentiable(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A function that calls `vjp` has a `vjp`, to every order, and <ct, J v> equals <pullback(ct), v> there too."""
    for _ in range(subject.order - 1):
        fn, primals = _derivative(subject, fn, primals)
        if not fn(*primals):
            break
        _check_by_differences(subject, fn, primals)


@law_of_functions
def pullbacks_may_be_repeated(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A pullback may be called any number of times, returns the same for the same cotangents, and leaves them alone."""
    outputs, pullback = subject.backend.vjp(fn, primals)
    cts, others = (_random_like(subject, outputs, seed) for seed in (1, 2))
    given, first = subject.values(cts), _values(subject, pullback(cts))
    pullback(others)
    _compare(_values(subject, pullback(cts)), first, "at the second call the cotangent of primal")
    _compare(subject.values(cts), given, "after the pullback the cotangent of output")


@law_of_functions
def pullbacks_keep_what_they_need(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A pullback keeps what it needs alive by itself, and runs on any thread."""
    outputs, pullback = subject.backend.vjp(fn, primals)
    cts = _random_like(subject, outputs, 1)
    expected = _values(subject, pullback(cts))
    pullback = subject.backend.vjp(fn, subject.given(subject.values(primals)))[1]
    del outputs
    gc.collect()
    found = _on_a_thread(lambda: _values(subject, pullback(cts)))
    _compare(found, expected, "the cotangent of primal")


@law_of_functions
def absent_cotangents_are_zero(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A cotangent that is None stands for zero."""
    outputs, pullback = pullback_of(subject.backend, fn, primals)
    cts = _random_like(subject, outputs, 1)
    zeros = subject.given([np.zeros_like(x) for x in subject.values(cts)])
    for count in range(len(cts) + 1):
        expected = _values(subject, pullback([*cts[:count], *zeros[count:]]))
        found = _values(subject, pullback([*cts[:count], *_none(len(cts) - count)]))
        _compare(found, expected, f"with {count} of {len(cts)} cotangents that of primal")


@law_of_functions
def pullbacks_have_pullbacks(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """`pullback.vjp(cts)` returns `pullback(cts)`, and the derivative by `(*primals, *cts)` that nested vjp returns."""
    outputs, pullback = pullback_of(subject.backend, fn, primals)
    cts = _random_like(subject, outputs, 1)
    found, second = pullback.vjp(cts)
    _compare(_values(subject, found), _values(subject, pullback(cts)), "the cotangent of primal")
    derived, _ = _derivative(subject, fn, primals)
    outputs, nested = subject.backend.vjp(derived, [*primals, *cts])
    cts = _random_like(subject, outputs, 2)
    remaining = iter(cts)
    given = [None if x is None else next(remaining) for x in found]
    _compare(_values(subject, second(given)), _values(subject, nested(cts)), "at second order the cotangent of input")


@law_of_functions
def unused_primals_have_no_influence(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A primal that the function does not use has a cotangent of None, or zeros."""
    outputs, pullback = subject.backend.vjp(lambda unused, *xs: fn(*xs), [*primals[:1], *primals])
    unused, *others = _values(subject, pullback(_random_like(subject, outputs, 1)))
    require(unused is None or not np.any(unused), f"{unused!r} for a primal that is not used.")
    require(any(ct is not None for ct in others), "no cotangent for the others.")


@law_of_functions
def one_tensor_may_be_two_primals(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """Primals that are the same object are told apart."""
    count = len(primals)
    outputs, pullback = pullback_of(
        subject.backend, lambda *xs: [*fn(*xs[:count]), *fn(*xs[count:])], [*primals, *primals]
    )
    cts = _random_like(subject, outputs[: len(outputs) // 2], 1)
    expected = _values(subject, subject.backend.vjp(fn, primals)[1](cts))
    found = _values(subject, pullback([*cts, *_none(len(cts))]))
    _compare(found, [*expected, *_none(count)], "the cotangent of primal")


@law_of_functions
def outputs_may_be_primals(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """Outputs may be the primals themselves."""
    outputs, pullback = subject.backend.vjp(lambda *xs: list(xs), primals)
    cts = _random_like(subject, outputs, 1)
    _compare(_values(subject, pullback(cts)), subject.values(cts), "the cotangent of primal")


@law_of_functions
def outputs_may_repeat(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """One tensor may be two outputs, each of which takes its own cotangent."""

    def repeated(*xs: Tensor) -> list[Tensor]:
        found = list(fn(*xs))
        return [*found, *found]

    outputs, pullback = pullback_of(subject.backend, repeated, primals)
    cts = _random_like(subject, outputs[: len(outputs) // 2], 1)
    expected = _values(subject, subject.backend.vjp(fn, primals)[1](cts))
    for given in ([*cts, *_none(len(cts))], [*_none(len(cts)), *cts]):
        _compare(_values(subject, pullback(given)), expected, "the cotangent of primal")


@law_of_functions
def placeholders_run(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """Functions run on placeholders, under vjp and its pullback too, and give the specs that they give on values."""
    spec = subject.backend.spec
    expected = [spec(y) for y in fn(*primals)]
    placeholders, running = subject.backend.placeholders([spec(x) for x in primals])
    with running():
        outputs, pullback = subject.backend.vjp(fn, placeholders)
        found = [spec(y) for y in outputs]
        cts = pullback(list(outputs))
        pulled = [None if ct is None else spec(ct) for ct in cts]
    require(found == expected, f"{found} instead of {expected}.")
    require(all(s in (None, spec(x)) for s, x in zip(pulled, primals, strict=True)), f"cotangents {pulled}.")


@law_of_functions
def native_functions_have_the_values(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """A function of `wrap_as_native` returns what its relay returns, integers among it as not differentiable."""
    native = _native(subject, lambda n, *xs: [n, *fn(*xs)], 1 + len(primals))
    number = subject.backend.from_numpy(np.array([7], np.int32))
    outcome = native(number, *primals)
    require(outcome.differentiable[0] is False, "that an integer is differentiable.")
    _compare(_values(subject, outcome.leaves), subject.values([number, *fn(*primals)]), "leaf")


@law_of_functions
def native_functions_have_the_derivatives(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """The framework differentiates a function of `wrap_as_native` as it does the function itself, to every order."""
    inner = _native(subject, fn, len(primals))
    own: Run = fn
    native: Run = lambda *xs: _present(inner(*xs).leaves)  # noqa: E731 (becomes its own derivative below)
    for order in range(1, subject.order + 1):
        outputs, expected = subject.backend.vjp(own, primals)
        _, found = subject.backend.vjp(native, primals)
        cts = _random_like(subject, outputs, order)
        what = f"at order {order} the cotangent of input"
        _compare(_values(subject, found(cts)), _values(subject, expected(cts)), what)
        (own, inputs), (native, _) = (_derivative(subject, f, primals) for f in (own, native))
        primals = inputs


@law_of_functions
def native_functions_pass_absent_cotangents(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """Of a function of `wrap_as_native`, outputs that nobody uses and inputs without influence change nothing."""
    inner = _native(subject, lambda unused, *xs: [*fn(*xs), *fn(*xs)], 1 + len(primals))
    expected, pullback = subject.backend.vjp(fn, primals)
    cts = _random_like(subject, expected, 1)
    _, found = subject.backend.vjp(lambda *xs: _present(inner(xs[0], *xs).leaves[: len(cts)]), primals)
    _compare(_values(subject, found(cts)), _values(subject, pullback(cts)), "the cotangent of primal")


def _native(subject: Subject, fn: Run, count: int) -> Callable[..., Outcome]:
    """Return a flat function of `count` tensors as a native one, which crosses from the backend to itself."""
    _, treedef = trees.flatten((tuple(_none(count)), {}))
    structure = Structure(treedef, _none(count), tuple(range(count)))
    exchange = Exchange(subject.backend, subject.backend)
    program = UserFunction(fn, "f", subject.backend, structure, classifier(subject.backend))
    return subject.backend.wrap_as_native(FunctionRelay(program, exchange))


def _derivative(subject: Subject, fn: Run, primals: list[Tensor]) -> tuple[Run, list[Tensor]]:
    """Return `(*primals, *cts) -> cotangents` of a function, by vjp inside of it, and a point to call it at."""
    count = len(primals)

    def derived(*inputs: Tensor) -> list[Tensor]:
        _, pullback = subject.backend.vjp(fn, inputs[:count])
        found = pullback(list(inputs[count:]))
        return [_zeros_like(subject, x) if ct is None else ct for x, ct in zip(primals, found, strict=True)]

    return derived, [*primals, *_random_like(subject, fn(*primals), count)]


def _check_by_differences(subject: Subject, fn: Run, primals: list[Tensor]) -> None:
    """Compare both sides of <ct, J v> = <pullback(ct), v> in random directions."""
    spec = subject.backend.spec
    outputs, pullback = subject.backend.vjp(fn, primals)
    cts = _random_like(subject, outputs, 1)
    found = pullback(cts)
    require(len(found) == len(primals), f"{len(found)} cotangents for {len(primals)} primals.")
    for x, ct in zip(primals, found, strict=True):
        require(ct is None or spec(ct) == spec(x), f"{ct!r} as the cotangent of {spec(x)}.")
    at, directions = subject.values(primals), subject.values(_random_like(subject, primals, 2))
    step = max(float(np.finfo(x.dtype).eps) for x in at) ** (1 / 3)

    def moved(by: float) -> list[Array]:
        points = [x + (by * v).astype(x.dtype) for x, v in zip(at, directions, strict=True)]
        return subject.values(subject.backend.run(lambda: fn(*subject.given(points))))

    change = [(b - a) / (2 * step) for a, b in zip(moved(-step), moved(step), strict=True)]
    by_differences = _inner(subject.values(cts), change)
    require_close(_inner(_values(subject, found), directions), by_differences, "<pullback(ct), v>")


def _inner(xs: Values, ys: Values) -> Array:
    """Return the real inner product, in which a complex number is a pair of real ones."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return np.asarray(sum(float(np.sum(np.real(np.conj(x) * y))) for x, y in pairs))


def _random_like(subject: Subject, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random tensors of the same shapes and dtypes."""
    random = np.random.default_rng(seed)

    def like(array: Array) -> Array:
        values = random.uniform(0.5, 1.5, array.shape)
        return np.asarray(values * (1 + 0.7j) if array.dtype.kind == "c" else values).astype(array.dtype)

    return subject.given([like(x) for x in subject.values(tensors)])


def _values(subject: Subject, tensors: Sequence[Tensor | None]) -> list[Array | None]:
    """Return copies of what tensors hold, None for what is not there."""
    return [None if x is None else subject.values([x])[0] for x in tensors]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _zeros_like(subject: Subject, x: Tensor) -> Tensor:
    spec = subject.backend.spec(x)
    return subject.backend.from_numpy(np.zeros(spec.shape, dtype(spec.dtype)))


def _compare(found: Values, expected: Values, what: str) -> None:
    require(len(found) == len(expected), f"{len(found)} instead of {len(expected)}: {what}s.")
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        require_close(x, y, f"{what} {number}")


def _none(count: int) -> list[Any]:
    return [None] * count


def _on_a_thread(fn: Callable[[], Any]) -> Any:
    """Return `fn()` from another thread, or raise what it raises."""
    found: list[Any] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            found.append(fn())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]
