"""Calls on arrays that are spread over four devices of JAX, against JAX itself; fails by an exception.

python -m tests.distributed.over_devices
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polybridge
from polybridge import CompilationError

rng = np.random.default_rng(0)
X, W = rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=(4, 2)).astype("float32")
calls: list[int] = []


def fn(x, w):
    calls.append(len(x))
    return torch.tanh(x @ w)


FN = polybridge.wrap(fn, src="torch", dst="jax")


def gradient(f):
    return jax.grad(lambda x, w: jnp.mean(f(x, w) ** 2), (0, 1))


def native(x, w):
    return jnp.tanh(x @ w)


EXPECTED = gradient(native)(X, W)


def check(found, expected=EXPECTED):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


def over_a_mesh(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        for transform in (lambda f: f, jax.jit):  # eagerly, compiled
            found = transform(gradient(FN))(x, w)
            check(found)
            moved = w - found[1] + (x @ w).sum()  # what JAX does with its own results, eagerly
            np.testing.assert_allclose(np.asarray(moved), W - EXPECTED[1] + (X @ W).sum(), rtol=1e-4)
            assert transform(FN)(x, w).sharding.is_fully_replicated
            check(transform(lambda x, w: jax.jvp(gradient(FN), (x, w), (x, w))[1])(x, w), second_derivative())
        calls.clear()
        jax.block_until_ready(jax.jit(gradient(FN))(x, w))
        assert calls == [8]  # whole, and once


def second_derivative():
    return jax.jvp(gradient(native), (X, W), (X, W))[1]


def over_a_part_of_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": P("data")}
    check([jax.jit(jax.shard_map(FN, **specs))(X, W)], [native(X, W)])
    calls.clear()
    jax.block_until_ready(jax.jit(jax.shard_map(FN, **specs))(X, W))
    assert set(calls) == {4}
    with pytest.raises(CompilationError, match="over some axes"):
        jax.jit(jax.shard_map(FN, axis_names={"data"}, **specs))(X, W)


def on_another_device():
    device = jax.devices()[2]
    x, w = jax.device_put((X, W), device)
    found = gradient(lambda x, w: FN(x, w) + 0 * native(x, w))(x, w)
    check(found)
    assert FN(x, w).devices() == jax.jit(FN)(x, w).devices() == found[0].devices() == {device}


def weights_on_no_device():
    bridged = polybridge.wrap(torch.nn.Linear(4, 2), dst="jax")
    x = jax.device_put(X, jax.devices()[1])
    assert jax.jit(bridged.apply)(bridged.params, bridged.state, x)[0].devices() == {jax.devices()[1]}


if __name__ == "__main__":
    over_a_mesh(AxisType.Auto)
    over_a_mesh(AxisType.Explicit)
    over_a_part_of_a_mesh()
    on_another_device()
    weights_on_no_device()
    print("done")
