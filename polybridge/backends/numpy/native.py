"""How NumPy takes a relay in: as a function of arrays that has its derivatives as attributes.

NumPy has no tape, so the caller asks by name. While he does, a recording waits for the flat call inside the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, SupportsIndex

import numpy as np

from polybridge.backends.numpy import convert
from polybridge.backends.numpy.convert import Array
from polybridge.backends.numpy.recording import Function, filled, recorded, waiting, waiting_for
from polybridge.core.errors import CotangentError, NotDifferentiableError
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import COMPLEX, DIFFERENTIABLE

_ONE_EACH = "a tuple with an entry for each positional argument"


def wrap_as_native(relay: FunctionRelay) -> Callable[..., Outcome]:
    """Return a function of arrays that evaluates the relay, with its pullback where one is waited for."""

    def native(*xs: Array) -> Outcome:
        recording = waiting.get()
        if recording is None:
            return relay(xs)
        with waiting_for(None):  # the foreign function may call others
            outcome, back = relay.vjp(xs, recording.wanted)
        recording.evaluated(outcome, back)
        return outcome

    return native


def decorate(function: Function) -> Function:
    """Give the function its derivatives as methods."""
    for derivative in (vjp, jvp, grad, value_and_grad, hessian):
        setattr(function, derivative.__name__, MethodType(derivative, function))
    return function


def vjp(function: Function, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Return the result and its pullback, from a cotangent of the result to a tuple, one for each positional argument.

    Cotangents are trees like the result and the arguments. In what the pullback takes, None stands for zero; in what it
    returns, for a leaf that is no floating or complex array.
    """
    out, recording = recorded(function, args, kwargs, range(len(args)))
    return out, lambda ct: tuple(recording.pull(recording.cotangents(ct)))


def jvp(function: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Return the result at `primals` and its derivative along `tangents`, a tree like the result.

    In tangents None stands for zero; in the derivative, for a leaf that is no floating or complex array.
    """
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise CotangentError.misfit(function.__name__, f"`{name}`", f"of type {type(given).__name__}", _ONE_EACH)
    out, recording = recorded(function, tuple(primals), {}, range(len(primals)))
    return out, recording.push(recording.tangents(tangents))


def grad(function: Function, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Any:
    """Return the gradient of a function whose result is one real number; the arguments are as of `value_and_grad`."""
    return value_and_grad(function, *args, argnums=argnums, **kwargs)[1]


def value_and_grad(
    function: Function, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any
) -> tuple[Array, Any]:
    """Return the value and the gradient of a function whose result is one real number.

    Args:
        function: what is differentiated.
        args: its positional arguments.
        argnums: which of them the gradient is taken in; for several of them it is a tuple.
        kwargs: its keyword arguments.
    """
    numbers = (argnums,) if isinstance(argnums, SupportsIndex) else tuple(argnums)
    value, recording = recorded(function, args, kwargs, numbers, strict=True)
    for number, argument in zip(numbers, recording.arguments, strict=True):
        recording.check(number, argument)
    gradients = recording.pull([recording.one()])
    return value, gradients[0] if isinstance(argnums, SupportsIndex) else tuple(gradients)


def hessian(function: Function, *args: Any, argnums: int = 0, **kwargs: Any) -> Array:
    """Return the second derivatives, in one real array, of a function whose result is one real number.

    Args:
        function: what is differentiated.
        args: its positional arguments.
        argnums: which of them; for an array of shape `s` the Hessian has shape `s + s`.
        kwargs: its keyword arguments.
    """
    _, recording = recorded(function, args, kwargs, (argnums,), strict=True)
    x = np.asarray(args[argnums])
    if not convert.is_tensor(args[argnums]) or x.dtype.name not in DIFFERENTIABLE - COMPLEX:
        raise NotDifferentiableError.of_argument(recording.call, argnums, "is not one real array")
    outcome, back = recording.pull_twice()
    found = np.zeros((x.size, *x.shape), x.dtype)
    if outcome.leaves[0] is not None:
        for row, direction in zip(found, np.eye(x.size, dtype=x.dtype), strict=True):
            (row[...],) = filled(back([x, direction.reshape(x.shape)]).leaves, [convert.spec(x)])
    return found.reshape(x.shape + x.shape)
