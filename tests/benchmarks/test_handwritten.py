"""The hand-written bridges and the peers give right values and gradients: no honest comparison without."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.handwritten import torch_in_tf_graph
from benchmarks.modes import MODES, Mode
from benchmarks.peers import Peer
from benchmarks.workloads import SMALL, WORKLOADS

X = np.linspace(-2.0, 2.0, 16, dtype=np.float32).reshape(4, 4)
CT = np.linspace(1.0, 3.0, 16, dtype=np.float32).reshape(4, 4)
VALUES = {"elementwise": np.sin(X) * X, "matmul": X @ X}
GRADIENTS = {"elementwise": CT * (np.cos(X) * X + np.sin(X)), "matmul": CT @ X.T + X.T @ CT}
for small in SMALL:
    VALUES[small.name], pull = jax.vjp(small.functions["jax"], X)
    (GRADIENTS[small.name],) = pull(CT)


def timed(mode: Mode) -> list[str]:
    """Return the names of the workloads that there are in the source of a mode."""
    return [name for name, workload in WORKLOADS.items() if mode.src in workload.functions]


PEERS = [(name, peer) for name, mode in MODES.items() for peer in mode.peers]


@pytest.mark.parametrize(
    ("name", "workload"), [(name, w) for name in MODES if name != "tf1-graph" for w in timed(MODES[name])]
)
def test_value_and_gradient(name: str, workload: str) -> None:
    mode, found = MODES[name], WORKLOADS[workload]
    fn = mode.handwritten(found.rule if mode.src == "numpy" else found.functions[mode.src])
    y, gradient = mode.drive(fn, X, CT, True)()
    check(workload, y, gradient)


@pytest.mark.parametrize(
    ("mode", "peer", "workload"),
    [pytest.param(m, p, w, id=f"{m}-{p.name}-{w}") for m, p in PEERS for w in timed(MODES[m])],
)
def test_value_and_gradient_of_a_peer(mode: str, peer: Peer, workload: str) -> None:
    if not peer.installed:
        pytest.skip(f"{peer.module} is not installed")
    functions = WORKLOADS[workload].functions
    fn = peer.bridge(functions[MODES[mode].src], X)
    y, gradient = MODES[mode].drive(fn, X, CT, True)()
    check(workload, y, gradient)


@pytest.mark.parametrize("workload", ["elementwise", "matmul"])
def test_value_and_gradient_in_a_tf1_graph(workload: str) -> None:
    fn = torch_in_tf_graph(WORKLOADS[workload].functions["torch"])
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, X.shape)
        y = fn(x)
        y_value, gradient = session.run([y, v1.gradients(y, x, grad_ys=tf.constant(CT))[0]], {x: X})
    check(workload, y_value, gradient)


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.src == "torch"])
def test_a_step_runs_the_torch_function_once(name: str) -> None:
    calls = []

    def fn(x: Any) -> Any:
        calls.append(x.shape)
        return x * 2

    step = MODES[name].drive(MODES[name].handwritten(fn), X, CT, True)
    step()
    calls.clear()
    step()
    assert len(calls) == 1


def check(workload: str, y: Any, gradient: Any) -> None:
    """Compare with the analytic output and gradient."""
    gradient = gradient[0] if isinstance(gradient, tuple) else gradient  # torch.autograd.grad returns a tuple
    y = y.detach() if hasattr(y, "detach") else y
    np.testing.assert_allclose(np.asarray(y), VALUES[workload], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), GRADIENTS[workload], rtol=1e-5, atol=1e-5)
