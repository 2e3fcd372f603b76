"""The columns of the grid by TensorFlow's own means: from a function to a function of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.grid.analytic import TANGENT
from tests.grid.cells import Case

Fn = Callable[..., Any]


def run(case: Case, f: Fn, _: Fn, x: Any) -> Any:
    """Return what the case asks for at `x`."""
    transformed = _WAYS[case.column, case.way](f)
    return _MODES[case.mode.name](transformed, x)


def _in_session(f: Fn, x: Any) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        placeholder = tf.compat.v1.placeholder(tf.float64, x.shape)
        return session.run(f(placeholder), {placeholder: x})


_MODES: dict[str, Callable[[Fn, Any], Any]] = {
    "eager": lambda f, x: f(tf.constant(x)),
    "`tf.function`": lambda f, x: tf.function(f)(tf.constant(x)),
    "`tf.function(jit_compile=True)`": lambda f, x: tf.function(f, jit_compile=True)(tf.constant(x)),
    "TF1 graph": _in_session,
}


def _gradient(f: Fn) -> Fn:
    def derived(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return derived


def _jacobian(f: Fn, vectorised: bool = True) -> Fn:
    def derived(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=not vectorised) as tape:  # TensorFlow asks for it there
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x, experimental_use_pfor=vectorised)

    return derived


def _pushed(f: Fn) -> Fn:
    def pushed(x: tf.Tensor) -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(x, tf.constant(TANGENT)) as accumulator:
            y = f(x)
        return accumulator.jvp(y)

    return pushed


def _symbolic_gradient(f: Fn) -> Fn:
    return lambda x: tf.gradients(f(x), x)[0]


def _symbolic_rows(f: Fn) -> Fn:
    def derived(x: tf.Tensor) -> tf.Tensor:
        y = f(x)
        return tf.stack([tf.gradients(y[i], x)[0] for i in range(len(TANGENT))])

    return derived


def _symbolic_pushed(f: Fn) -> Fn:
    """Return the derivative of the pullback in its cotangent, which is how programs of TensorFlow 1 go forward."""

    def pushed(x: tf.Tensor) -> tf.Tensor:
        y = f(x)
        ct = tf.ones_like(y)
        return tf.gradients(tf.gradients(y, x, ct), ct, tf.constant(TANGENT))[0]

    return pushed


_WAYS: dict[tuple[str, str], Callable[[Fn], Fn]] = {
    ("value", "a call"): lambda f: f,
    ("first", "tf.GradientTape.gradient"): _gradient,
    ("first", "tf.gradients"): _symbolic_gradient,
    ("second", "tf.GradientTape.gradient"): lambda f: _gradient(_gradient(f)),
    ("second", "tf.gradients"): lambda f: _symbolic_gradient(_symbolic_gradient(f)),
    ("jvp", "tf.autodiff.ForwardAccumulator"): _pushed,
    ("jvp", "tf.gradients of tf.gradients"): _symbolic_pushed,
    ("vmap", "tf.vectorized_map"): lambda f: lambda x: tf.vectorized_map(f, x),
    ("vmap", "tf.map_fn"): lambda f: lambda x: tf.map_fn(f, x),
    ("jacobian", "tf.GradientTape.jacobian"): _jacobian,
    ("jacobian", "tf.GradientTape.jacobian without pfor"): lambda f: _jacobian(f, vectorised=False),
    ("jacobian", "tf.gradients of each element"): _symbolic_rows,
    ("hessian", "tf.GradientTape.jacobian"): lambda f: _jacobian(_gradient(f)),
    ("hessian", "tf.hessians"): lambda f: lambda x: tf.hessians(tf.reduce_sum(f(x)), x)[0],
}
