"""Asks that a function of JAX with its params and state is a module of torch."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import polybridge


def init(key):
    one, other = jax.random.split(key)
    return {"layers": [jax.random.normal(one, (3, 4)), jax.random.normal(other, (4, 2))], "bias": jnp.zeros(2)}


def apply(params, x):
    return jnp.tanh(x @ params["layers"][0]) @ params["layers"][1] + params["bias"]


def counted(params, state, x, training):
    mean = jnp.where(training, 0.5 * state["mean"] + 0.5 * x.mean(0), state["mean"])
    return (x - mean) * params["scale"], {"mean": mean, "calls": state["calls"] + 1}


def dropped(params, x, rng, training):
    keep = jax.random.bernoulli(rng, 0.5, x.shape)
    return jnp.where(keep, 2 * x, 0) * params["scale"] if training else x * params["scale"]


def built(seed=0):
    return apply, init(jax.random.key(seed))


def test_a_pair_trains_as_in_jax():
    params = init(jax.random.key(0))
    module = polybridge.wrap(apply, src="jax", dst="torch", params=params)
    assert {name for name, _ in module.named_parameters()} == {"layers.0", "layers.1", "bias"}
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    rng = np.random.default_rng(0)
    for _ in range(5):
        x = rng.standard_normal((6, 3)).astype("float32")
        optimizer.zero_grad()
        module(torch.from_numpy(x)).square().mean().backward()
        optimizer.step()
        grads = jax.grad(lambda p, x=x: (apply(p, x) ** 2).mean())(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    for mine, theirs in zip(jax.tree.leaves(module.sync_to_source()), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_state_is_buffers_that_a_call_changes_once():
    state = {"mean": jnp.zeros(2), "calls": jnp.zeros((), jnp.int32)}
    module = polybridge.wrap(counted, src="jax", dst="torch", params={"scale": jnp.ones(2)}, state=state)
    module(torch.ones(3, 2)).sum().backward()
    module.eval()
    assert module(torch.ones(3, 2)).tolist() == [[0.5, 0.5]] * 3
    assert int(module.state_dict()["calls"]) == 2
    _, state = module.sync_to_source()
    assert state["mean"].tolist() == [0.5, 0.5] and int(state["calls"]) == 2


def test_a_key_follows_torch_s_seed():
    module = polybridge.wrap(dropped, src="jax", dst="torch", params={"scale": jnp.ones(())})
    x = torch.ones(8, 16)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn += [module(x).detach(), module(x).detach()]
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[4])
    y = module(x.requires_grad_())
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize("factory", [None, functools.partial(built, seed=0)], ids=["by itself", "by a factory"])
def test_a_pair_is_pickled(factory):
    module = polybridge.wrap(apply, src="jax", dst="torch", params=init(jax.random.key(0)), factory=factory)
    with torch.no_grad():
        module.bias.fill_(3)
    again = pickle.loads(pickle.dumps(module))
    x = torch.ones(1, 3)
    assert torch.equal(again(x), module(x)) and again.bias.tolist() == [3, 3]


def test_a_factory_that_builds_something_else_is_refused():
    module = polybridge.wrap(apply, src="jax", dst="torch", params={"w": jnp.ones(2)}, factory=built)
    with pytest.raises(polybridge.FactoryError, match=r"not what was saved.*'layers.0'.*'w'"):
        pickle.loads(pickle.dumps(module))


def test_a_cast_module_computes_in_its_dtype():
    module = polybridge.wrap(apply, src="jax", dst="torch", params=init(jax.random.key(0))).bfloat16()
    y = module(torch.ones(2, 3, dtype=torch.bfloat16))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert module.bias.grad.dtype is torch.bfloat16
