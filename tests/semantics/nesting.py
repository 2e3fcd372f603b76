"""Calls that nest three and four frameworks deep: `python -m tests.semantics.nesting INTER_OP_THREADS NAME...`.

Prints one line for each scenario, `NAME: ok` or what went wrong; one that has not ended after some seconds is a hang,
and the stacks of all threads go to the standard error.
"""

import itertools
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
import tensorflow as tf
import torch

import polybridge
from tests.semantics.attempts import main

SECONDS = 60
SIZES = {"small": 10, "large": 4_000_000}
FRAMEWORKS = ("torch", "tensorflow", "jax")
STAGED = {"torch": "torch.compile", "tensorflow": "tf.function", "jax": "jax.jit"}

Chain = Sequence[str]


def power(chain: Chain) -> Callable:
    """Return x**n for a chain of n frameworks, as a function of the first, each of which calls the next."""
    if len(chain) == 1:
        return lambda x: x * 1
    rule = {"vjp": (lambda x: (x * 1, None), lambda _, ct: (ct * 1,))} if chain[1:] == ("numpy",) else {}
    inner = polybridge.wrap(power(chain[1:]), src=chain[1], dst=chain[0], **rule)
    return lambda x: inner(x) * x


def differentiated(framework: str, fn: Callable, size: int, staged: bool) -> Callable[[], tuple]:
    """Return a function that gives `fn` at 2 twice, the second time with its gradient, by the framework's own means."""
    if framework == "torch":
        fn = torch.compile(fn, backend="aot_eager") if staged else fn

        def in_torch():
            x = torch.full((size,), 2.0, requires_grad=True)
            y = fn(x)
            y.sum().backward()
            return fn(x.detach()), y.detach(), x.grad

        return in_torch
    if framework == "tensorflow":

        def in_tensorflow(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(x)
            return fn(x), y, tape.gradient(y, x)

        step = tf.function(in_tensorflow) if staged else in_tensorflow
        return lambda: step(tf.fill([size], 2.0))

    def in_jax(x):
        y, pull = jax.vjp(fn, x)
        return fn(x), y, pull(jax.numpy.ones_like(y))[0]

    step = jax.jit(in_jax) if staged else in_jax
    return lambda: step(jax.numpy.full(size, 2.0, "float32"))


def scenario(chain: Chain, size: int, staged: bool) -> Callable[[], None]:
    """Return a check of value and gradient of x**n at 2."""
    fn, degree = power(chain), len(chain)
    both = differentiated(chain[0], fn, size, staged)

    def check() -> None:
        for found, expected in zip(both(), (2**degree, 2**degree, degree * 2 ** (degree - 1)), strict=True):
            array = np.asarray(found)
            assert array.shape == (size,) and (array == expected).all(), f"{array[:3]} and not {expected}"

    return check


def in_threads(checks: Sequence[Callable[[], None]], times: int = 3) -> None:
    """Run checks in threads that start together; the first failure is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(checks))

    def work(check: Callable[[], None]) -> None:
        try:
            barrier.wait()
            for _ in range(times):
                check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[check], daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def name_of(chain: Chain, staged: bool, size: str, threads: int) -> str:
    """Return the name of a scenario."""
    outer = STAGED[chain[0]] if staged else "eager"
    return f"{' > '.join(chain)}, {outer}, {size}, {threads} thread{'s' * (threads > 1)}"


def chains() -> list[Chain]:
    """Return all orders of three where neighbours differ, some of four, and some that end in NumPy."""
    three = [c for c in itertools.product(FRAMEWORKS, repeat=3) if c[0] != c[1] != c[2]]
    four = [(a, b, c, a) for a, b, c in itertools.permutations(FRAMEWORKS)]
    four += [(a, b, a, b) for a, b in itertools.permutations(FRAMEWORKS, 2)]
    return [*three, *four, *((a, b, "numpy") for a, b in itertools.permutations(FRAMEWORKS, 2))]


def table() -> dict[str, Callable[[], None]]:
    """Return all scenarios."""
    found = {}
    for chain, staged in itertools.product(chains(), (False, True)):
        is_three = len(chain) == 3 and chain[-1] != "numpy"
        for size, threads in [("small", 1), *((("large", 1), ("small", 2)) if is_three else ())]:
            if threads > 1 and staged and chain[0] == "torch":
                continue  # torch.compile itself is not made to trace in two threads

            def run(chain=chain, size=SIZES[size], staged=staged, threads=threads) -> None:
                check = scenario(chain, size, staged)
                check()
                in_threads([check] * threads)

            found[name_of(chain, staged, size, threads)] = run
    for (a, b), staged in itertools.product(itertools.combinations(FRAMEWORKS, 2), (False, True)):

        def beside(a=a, b=b, staged=staged) -> None:
            checks = [scenario(chain, 1000, staged) for chain in ((a, b, a), (b, a, b))]
            for check in checks:
                check()
            in_threads(checks * 2)

        found[f"{a} > {b} > {a} beside {b} > {a} > {b}, {'staged' if staged else 'eager'}"] = beside
    return found


SCENARIOS = table()


if __name__ == "__main__":
    main(SCENARIOS, SECONDS)
