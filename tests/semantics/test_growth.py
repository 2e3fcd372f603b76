"""Asks that calls of the less common kinds do not add up either; `test_memory.py` asks it of plain ones.

`python -m tests.semantics.test_growth` prints by how many megabytes each kind grows its process.
"""

import subprocess
import sys

import pytest
import tensorflow as tf
import torch

from benchmarks.memory import _resident_megabytes
from tests.semantics import processes
from tests.semantics.calls import to_tf, to_torch, with_gradient

WARM_UP, CALLS, LIMIT_MEGABYTES = 1_000, 4_000, 2  # 500 bytes a call; what keeps something per call keeps more

T, X = torch.ones(16, requires_grad=True), tf.ones([16])
FROM_TF, FROM_TORCH = to_torch(lambda x: x**3), to_tf(lambda x: x**3)
TREE = to_tf(lambda x, *, scale, how: {"y": x * scale["by"][0], "how": how})
ROUND_TRIP = to_tf(lambda x: FROM_TF(x) * 2)


def second_in_torch():
    """Differentiate twice, eagerly."""
    (g,) = torch.autograd.grad(FROM_TF(T).sum(), T, create_graph=True)
    torch.autograd.grad(g.sum(), T)


def second_in_tensorflow(x=X):
    """Differentiate twice, eagerly or in a graph."""
    return with_gradient(lambda x: with_gradient(FROM_TORCH, x)[1], x)[1]


def looped(x):
    """Differentiate a loop of calls."""
    return with_gradient(lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, FROM_TORCH(x)), [0, x])[1], x)


def fails():
    """Raise in the wrapped function."""
    try:
        FROM_TF("no tensor", 1)
    except TypeError:
        return


GRAPH_SECOND, GRAPH_LOOP, GRAPH_ALONE = tf.function(second_in_tensorflow), tf.function(looped), tf.function(FROM_TORCH)
KINDS = {
    "second order in torch": second_in_torch,
    "second order in tensorflow": second_in_tensorflow,
    "second order in a graph": lambda: GRAPH_SECOND(X),
    "a loop in a graph": lambda: GRAPH_LOOP(X),
    "a tape around a graph": lambda: with_gradient(GRAPH_ALONE, X),
    "trees and static values": lambda: TREE(X, scale={"by": [X]}, how="well"),
    "torch in tensorflow in torch": lambda: with_gradient(ROUND_TRIP, X),
    "a function that is wrapped anew": lambda: with_gradient(to_tf(torch.square), X),
    "a call that fails": fails,
}


@pytest.fixture(scope="module")
def grown():
    """Return the megabytes by kind."""
    command = [sys.executable, "-m", "tests.semantics.test_growth"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=processes.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return {kind: float(number) for kind, number in (line.rsplit(": ", 1) for line in done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_thousand_calls_leave_less_than_two_megabytes(grown, kind):
    assert grown[kind] < LIMIT_MEGABYTES


if __name__ == "__main__":
    for kind, call in KINDS.items():
        for _ in range(WARM_UP):
            call()
        before = _resident_megabytes()
        for _ in range(CALLS):
            call()
        print(f"{kind}: {_resident_megabytes() - before}", flush=True)
