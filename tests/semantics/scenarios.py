"""Nested and concurrent calls that could hang: `python -m tests.semantics.scenarios INTER_OP_THREADS NAME...`.

Prints one line for each scenario, `NAME: ok` or what went wrong; one that has not ended after some seconds is a hang.
"""

import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import torch

import polybridge
from tests.semantics.attempts import main

SECONDS = 20
SIZES = {"small": 10, "large": 4_000_000}


def to_tf(fn):
    """Wrap a torch function for TensorFlow."""
    return polybridge.wrap(fn, src="torch", dst="tf")


def to_torch(fn):
    """Wrap a TensorFlow function for torch."""
    return polybridge.wrap(fn, src="tf", dst="torch")


def cube(depth: int, framework: str, graph: bool) -> Callable:
    """Return x**3 as a function of `framework` that changes the framework `depth` times on its way to x**2."""
    if depth == 0:
        return lambda x: x * x * x
    if framework == "tf":
        inner = cube(depth - 1, "torch", graph)
        return to_tf(lambda x: inner(x) * 1)
    inner = cube(depth - 1, "tf", graph)
    return to_torch(tf.function(lambda x: inner(x) * 1) if graph else lambda x: inner(x) * 1)


def tf_orders(fn, x):
    """Return value, first and second derivative of `fn` at x, by tapes."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        g = tape.gradient(y, x)
    return y, g, outer.gradient(g, x)


def torch_orders(fn, x):
    """Return value, first and second derivative of `fn` at x, by autograd."""
    y = fn(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    return y, g, h


def check(found) -> None:
    """Ask that the results are 8, 12, 12: those of x**3 at 2."""
    for value, expected in zip(found, (8, 12, 12), strict=True):
        array = value.detach().numpy() if isinstance(value, torch.Tensor) else value.numpy()
        np.testing.assert_array_equal(array, np.full_like(array, expected))


def from_tf(depth: int, size: int, mode: str, inner_graph: bool) -> Callable[[], None]:
    """Return a scenario that starts in TensorFlow."""
    fn = cube(depth, "tf", inner_graph)
    step = tf.function(lambda x: tf_orders(fn, x)) if mode == "graph" else lambda x: tf_orders(fn, x)
    return lambda: check(step(tf.fill([size], 2.0)))


def from_torch(depth: int, size: int, inner_graph: bool) -> Callable[[], None]:
    """Return a scenario that starts in torch."""
    fn = cube(depth, "torch", inner_graph)
    return lambda: check(torch_orders(fn, torch.full((size,), 2.0, requires_grad=True)))


def repeatedly(scenario: Callable[[], None], times: int = 5) -> Callable[[], None]:
    """Return the scenario, several times."""
    return lambda: [scenario() for _ in range(times)] and None


def in_threads(scenario: Callable[[], None], count: int, times: int = 3) -> Callable[[], None]:
    """Return the scenario in several threads that start together; the first failure is raised."""

    def run() -> None:
        errors: list[BaseException] = []
        barrier = threading.Barrier(count)

        def work() -> None:
            try:
                barrier.wait()
                for _ in range(times):
                    scenario()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return run


def backward_in_another_thread() -> None:
    """Differentiate in a thread what was computed in this one, in both directions."""
    x = torch.full((3,), 2.0, requires_grad=True)
    y = to_torch(lambda x: x**3)(x)
    with tf.GradientTape() as tape:
        t = tf.fill([3], 2.0)
        tape.watch(t)
        z = to_tf(lambda x: x**3)(t)
    found = []
    thread = threading.Thread(target=lambda: (y.sum().backward(), found.append(tape.gradient(z, t))))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(x.grad, [12, 12, 12])
    np.testing.assert_array_equal(found[0], [12, 12, 12])


def graphs_beside_nested_calls() -> None:
    """Run tf.functions of one's own while another thread is inside of nested callbacks."""
    nested = from_tf(2, 1000, "graph", True)
    own = tf.function(lambda x: tf_orders(lambda x: x * x * x, x))

    def both() -> None:
        nested()
        check(own(tf.fill([5], 2.0)))

    in_threads(both, 4, times=10)()
    if tf.config.functions_run_eagerly():
        raise AssertionError("tf.functions are still run eagerly")


SCENARIOS: dict[str, Callable[[], Callable[[], None]]] = {
    "backward in another thread": lambda: backward_in_another_thread,
    "graphs beside nested calls": lambda: graphs_beside_nested_calls,
}
for _size_name, _size in SIZES.items():
    for _inner in (False, True):
        _kind = f"{_size_name}, inner {'tf.function' if _inner else 'plain'}"
        for _mode in ("eager", "graph"):
            for _depth in (2, 3) if _size_name == "small" else (2,):
                _args = (_depth, _size, _mode, _inner)
                SCENARIOS[f"tf {_mode}, depth {_depth}, {_kind}"] = lambda a=_args: repeatedly(from_tf(*a))
        for _depth in (2, 3) if _size_name == "small" else (2,):
            _args = (_depth, _size, _inner)
            SCENARIOS[f"torch, depth {_depth}, {_kind}"] = lambda a=_args: repeatedly(from_torch(*a))
for _inner in (False, True):
    _kind = f"inner {'tf.function' if _inner else 'plain'}"
    SCENARIOS[f"tf graph, 2 threads, depth 2, {_kind}"] = lambda i=_inner: in_threads(from_tf(2, 1000, "graph", i), 2)
    SCENARIOS[f"tf eager, 2 threads, depth 2, {_kind}"] = lambda i=_inner: in_threads(from_tf(2, 1000, "eager", i), 2)
    SCENARIOS[f"torch, 2 threads, depth 2, {_kind}"] = lambda i=_inner: in_threads(from_torch(2, 1000, i), 2)
for _mode in ("eager", "graph"):
    SCENARIOS[f"tf {_mode}, 8 threads"] = lambda m=_mode: in_threads(from_tf(1, 100, m, False), 8)
for _inner in (False, True):
    SCENARIOS[f"torch, 8 threads, inner {'tf.function' if _inner else 'plain'}"] = lambda i=_inner: in_threads(
        from_torch(1, 100, i), 8
    )


if __name__ == "__main__":
    main({name: lambda make=make: make()() for name, make in SCENARIOS.items()}, SECONDS)
