"""The laws of derivatives: those that the framework gives as a source, and those that it takes as a destination."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polybridge.core import trees
from polybridge.core.backend import Backend, Pullback, Run, Tensor, pullback_of
from polybridge.core.exchange import Exchange
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.trees import Structure
from polybridge.core.wrapping import classifier
from polybridge.testing.subject import Array, Subject, law, require, require_close, require_same

Values = Sequence[Array | None]


@law
def vjp_evaluates(subject: Subject) -> None:
    """`vjp` returns what the function returns, and leaves the primals as they are."""
    for fn, primals in subject.points():
        before, expected = subject.values(primals), subject.values(fn(*primals))
        outputs, _ = subject.backend.vjp(fn, primals)
        _compare(subject.values(outputs), expected, "output")
        for x, was in zip(subject.values(primals), before, strict=True):
            require_same(x, was, "after vjp the primal")  # type: ignore[arg-type]


@law
def pullbacks_are_the_transposed_derivative(subject: Subject) -> None:
    """<ct, J v> equals <pullback(ct), v>, where J v is found by finite differences."""
    for fn, primals in subject.points():
        _check_by_differences(subject, fn, primals)


@law
def vjp_inside_vjp_is_differentiable(subject: Subject) -> None:
    """A function that calls `vjp` has a `vjp`, to every order, and <ct, J v> equals <pullback(ct), v> there too."""
    for fn, primals in subject.points():
        for _ in range(subject.order - 1):
            fn, primals = _derivative(subject, fn, primals)
            if not fn(*primals):
                break
            _check_by_differences(subject, fn, primals)


@law
def pullbacks_may_be_repeated(subject: Subject) -> None:
    """A pullback may be called any number of times, with the same result for the same cotangents, and keeps them."""
    for fn, primals in subject.points():
        outputs, pullback = subject.backend.vjp(fn, primals)
        cts, others = (_random_like(subject, outputs, seed) for seed in (1, 2))
        given, first = subject.values(cts), subject.values(pullback(cts))
        pullback(others)
        _compare(subject.values(pullback(cts)), first, "at the second call the cotangent of primal")
        _compare(subject.values(cts), given, "after the pullback the cotangent of output")


@law
def pullbacks_keep_what_they_need(subject: Subject) -> None:
    """A pullback keeps what it needs alive by itself, and runs on any thread."""
    for fn, primals in subject.points():
        outputs, pullback = subject.backend.vjp(fn, primals)
        cts = _random_like(subject, outputs, 1)
        expected = subject.values(pullback(cts))
        _, alone = subject.backend.vjp(fn, subject.given(subject.values(primals)))  # type: ignore[arg-type]
        del outputs, pullback
        gc.collect()
        _compare(
            _on_a_thread(lambda alone=alone, cts=cts: subject.values(alone(cts))), expected, "the cotangent of primal"
        )


@law
def absent_cotangents_are_zero(subject: Subject) -> None:
    """A cotangent that is None stands for zero."""
    for fn, primals in subject.points():
        outputs, pullback = _twice(subject.backend, fn, primals)
        cts = _random_like(subject, outputs, 1)
        zeros = subject.given([np.zeros_like(x) for x in subject.values(cts)])  # type: ignore[arg-type]
        for kept in range(len(cts) + 1):
            expected = subject.values(pullback([*cts[:kept], *zeros[kept:]]))
            found = subject.values(pullback([*cts[:kept], *[None] * (len(cts) - kept)]))
            _compare(found, expected, f"with {kept} of {len(cts)} cotangents that of primal")


@law
def pullbacks_have_pullbacks(subject: Subject) -> None:
    """`pullback.vjp(cts)` returns `pullback(cts)`, and the derivative of `(*primals, *cts)` that nested vjp returns."""
    for fn, primals in subject.points():
        outputs, pullback = pullback_of(subject.backend, fn, primals)
        cts = _random_like(subject, outputs, 1)
        found, second = pullback.vjp(cts)
        _compare(subject.values(found), subject.values(pullback(cts)), "the cotangent of primal")
        derived, inputs = _derivative(subject, fn, primals)
        connected = [x is not None for x in found]
        ct_of = iter(_random_like(subject, [x for x in found if x is not None], 2))
        given = [next(ct_of) if is_connected else None for is_connected in connected]
        _, nested = subject.backend.vjp(derived, [*primals, *cts])
        require(len(inputs) == len(primals) + len(cts), "another number of inputs.")
        expected = nested([ct for ct in given if ct is not None])
        _compare(subject.values(second(given)), subject.values(expected), "at second order the cotangent of input")


@law
def unused_primals_have_no_influence(subject: Subject) -> None:
    """A primal that the function does not use has a cotangent of None, or zeros."""
    for fn, primals in subject.points():
        outputs, pullback = subject.backend.vjp(lambda unused, *xs, fn=fn: fn(*xs), [primals[0], *primals])
        unused, *others = subject.values(pullback(_random_like(subject, outputs, 1)))
        require(unused is None or not np.any(unused), f"{unused!r} for a primal that is not used.")
        require(any(ct is not None for ct in others), "no cotangent for the others.")


@law
def one_tensor_may_be_two_primals(subject: Subject) -> None:
    """Primals that are the same object are told apart."""
    for fn, primals in subject.points():
        count = len(primals)

        def both(*xs: Tensor, fn: Run = fn, count: int = count) -> list[Tensor]:
            return [*fn(*xs[:count]), *fn(*xs[count:])]

        outputs, pullback = _twice(subject.backend, both, [*primals, *primals])
        cts = _random_like(subject, outputs, 1)
        half = len(cts) // 2
        expected = subject.values(subject.backend.vjp(fn, primals)[1](cts[:half]))
        found = subject.values(pullback([*cts[:half], *[None] * half]))
        _compare(found, [*expected, *[None] * count], "the cotangent of primal")


@law
def outputs_may_repeat(subject: Subject) -> None:
    """Outputs may be primals themselves, or one tensor twice; each takes its own cotangent."""
    for fn, primals in subject.points():
        outputs, pullback = subject.backend.vjp(lambda *xs: list(xs), primals)
        cts = _random_like(subject, outputs, 1)
        _compare(subject.values(pullback(cts)), subject.values(cts), "of the identity the cotangent of primal")

        def repeated(*xs: Tensor, fn: Run = fn) -> list[Tensor]:
            found = list(fn(*xs))
            return [*found, *found]

        outputs, pullback = _twice(subject.backend, repeated, primals)
        half = len(outputs) // 2
        cts = _random_like(subject, outputs[:half], 1)
        expected = subject.values(pullback([*cts, *[None] * half]))
        _compare(subject.values(pullback([*[None] * half, *cts])), expected, "of the second the cotangent of primal")


@law
def placeholders_run(subject: Subject) -> None:
    """Functions run on placeholders, under vjp too, and give the specs that they give on values."""
    for fn, primals in subject.points():
        expected = [subject.backend.spec(y) for y in fn(*primals)]
        placeholders, running = subject.backend.placeholders([subject.backend.spec(x) for x in primals])
        with running():
            outputs, pullback = subject.backend.vjp(fn, placeholders)
            found = [subject.backend.spec(y) for y in outputs]
            pullback(list(outputs))
        require(found == expected, f"{found} instead of {expected}.")


@law
def native_functions_have_the_values(subject: Subject) -> None:
    """A function of `wrap_as_native` returns what its relay returns, on tensors of any kind, differentiated or not."""
    for fn, primals in subject.points():
        native = _native(subject.backend, lambda n, *xs, fn=fn: [n, *fn(*xs)], 1 + len(primals))
        number = subject.backend.from_numpy(np.array([7], np.int32))
        outcome = native(number, *primals)
        require(outcome.differentiable[0] is False, "that an integer is differentiable.")
        _compare(subject.values(outcome.leaves), subject.values([number, *fn(*primals)]), "leaf")


@law
def native_functions_have_the_derivatives(subject: Subject) -> None:
    """The framework differentiates a function of `wrap_as_native` as it does the function itself, to every order."""
    for fn, primals in subject.points():
        inner = _native(subject.backend, fn, len(primals))

        def native(*xs: Tensor, inner: Callable[..., Outcome] = inner) -> list[Tensor | None]:
            return inner(*xs).leaves

        own, crossed = fn, native
        for order in range(1, subject.order + 1):
            outputs, expected = subject.backend.vjp(own, primals)
            _, found = subject.backend.vjp(crossed, primals)
            cts = _random_like(subject, outputs, order)
            _compare(
                subject.values(found(cts)), subject.values(expected(cts)), f"at order {order} the cotangent of input"
            )
            (own, inputs), (crossed, _) = (_derivative(subject, f, primals) for f in (own, crossed))
            primals = inputs
            if not own(*primals):
                break


@law
def native_functions_pass_absent_cotangents(subject: Subject) -> None:
    """Outputs of a function of `wrap_as_native` that nobody uses, and inputs without influence, change nothing."""
    for fn, primals in subject.points():
        inner = _native(subject.backend, lambda unused, *xs, fn=fn: [*fn(*xs), *fn(*xs)], 1 + len(primals))
        outputs, pullback = subject.backend.vjp(lambda *xs, inner=inner: inner(xs[0], *xs).leaves, primals)
        half = len(outputs) // 2
        cts = _random_like(subject, outputs[:half], 1)
        expected = subject.values(subject.backend.vjp(fn, primals)[1](cts))
        _, pullback = pullback_of(subject.backend, lambda *xs, inner=inner: inner(xs[0], *xs).leaves, primals)
        _compare(subject.values(pullback([*cts, *[None] * half])), expected, "the cotangent of primal")


def _native(backend: Backend, fn: Run, count: int) -> Callable[..., Outcome]:
    """Return a flat function of `count` tensors as a native one that crosses from the backend to itself."""
    _, treedef = trees.flatten(((None,) * count, {}))
    structure = Structure(treedef, [None] * count, tuple(range(count)))
    relay = FunctionRelay(fn, "f", Exchange(backend, backend), structure, classifier(backend))
    return backend.wrap_as_native(relay)


def _twice(backend: Backend, fn: Run, primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
    return pullback_of(backend, fn, primals)


def _derivative(subject: Subject, fn: Run, primals: Sequence[Tensor]) -> tuple[Run, list[Tensor]]:
    """Return `(*primals, *cts) -> cotangents` of a function, by vjp inside of it, and a point to call it at."""
    count = len(primals)

    def derived(*inputs: Tensor) -> list[Tensor]:
        _, pullback = subject.backend.vjp(fn, inputs[:count])
        return [ct for ct in pullback(list(inputs[count:])) if ct is not None]

    return derived, [*primals, *_random_like(subject, fn(*primals), count)]


def _check_by_differences(subject: Subject, fn: Run, primals: Sequence[Tensor]) -> None:
    """Compare both sides of <ct, J v> = <pullback(ct), v> in random directions."""
    backend = subject.backend
    outputs, pullback = backend.vjp(fn, primals)
    cts = _random_like(subject, outputs, 1)
    at = subject.values(primals)
    directions = subject.values(_random_like(subject, primals, 2))
    found = pullback(cts)
    require(len(found) == len(primals), f"{len(found)} cotangents for {len(primals)} primals.")
    for x, ct in zip(primals, found, strict=True):
        require(ct is None or backend.spec(ct) == backend.spec(x), f"{ct!r} as the cotangent of {backend.spec(x)}.")
    step = max(float(np.finfo(x.dtype).eps) for x in at) ** (1 / 3)  # type: ignore[union-attr]

    def moved(sign: int) -> list[Array | None]:
        points = [x + (sign * step * v).astype(x.dtype) for x, v in zip(at, directions, strict=True)]  # type: ignore
        return subject.values(backend.run(lambda: fn(*subject.given(points))))

    change = [(b - a) / (2 * step) for a, b in zip(moved(-1), moved(+1), strict=True)]  # type: ignore[operator]
    by_differences = _inner(subject.values(cts), change)
    require_close(_inner(subject.values(found), directions), by_differences, "<pullback(ct), v>")


def _inner(xs: Values, ys: Values) -> Array:
    """Return the real inner product, in which complex numbers are pairs of real ones."""
    pairs = ((x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None)
    return np.asarray(sum(np.sum(np.real(np.conj(x) * y)) for x, y in pairs))


def _random_like(subject: Subject, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random tensors of the same shapes and dtypes."""
    random, found = np.random.default_rng(seed), []
    for tensor in chain(tensors):
        array: Any = subject.backend.to_numpy(tensor)
        values = random.uniform(0.5, 1.5, array.shape) + (
            1j * random.uniform(0.5, 1.5) if array.dtype.kind == "c" else 0
        )
        found.append(subject.backend.from_numpy(np.asarray(values).astype(array.dtype)))
    return found


def _compare(found: Values, expected: Values, what: str) -> None:
    require(len(found) == len(expected), f"{len(found)} instead of {len(expected)}: {what}s.")
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        require_close(x, y, f"{what} {number}")


def _on_a_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    require(found, "that it fails on another thread.")
    return found[0]
