"""Asks that forward mode in a destination uses the `jvp=` that the caller of `wrap` gave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import polybridge

X, V = np.array([0.3, -0.7, 1.6]), np.array([1.0, 2.0, -1.0])


@pytest.fixture
def seen():
    """Return a list of calls, and a rule whose derivative, 10 v, is not that of its function."""
    calls = []

    def jvp(primals, tangents):
        calls.append("jvp")
        return np.sin(primals[0]), 10 * tangents[0]

    return calls, jvp


def test_in_torch_func(seen):
    calls, jvp = seen
    f = polybridge.wrap(np.sin, src="numpy", dst="torch", jvp=jvp)
    y, tangent = torch.func.jvp(f, (torch.tensor(X),), (torch.tensor(V),))
    np.testing.assert_array_equal(tangent, 10 * V)
    np.testing.assert_allclose(y, np.sin(X))
    assert calls == ["jvp"]


def test_in_a_batch_of_torch_func(seen):
    f = polybridge.wrap(np.sin, src="numpy", dst="torch", jvp=seen[1])
    np.testing.assert_allclose(torch.func.jacfwd(f)(torch.tensor(X)), 10 * np.eye(3))


def test_in_forward_mode_of_autograd(seen):
    f = polybridge.wrap(np.sin, src="numpy", dst="torch", jvp=seen[1])
    with torch.autograd.forward_ad.dual_level():
        y = f(torch.autograd.forward_ad.make_dual(torch.tensor(X), torch.tensor(V)))
        np.testing.assert_array_equal(torch.autograd.forward_ad.unpack_dual(y).tangent, 10 * V)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_in_jax(seen, staged):
    calls, jvp = seen
    f = polybridge.wrap(np.sin, src="numpy", dst="jax", jvp=jvp)
    push = lambda x, v: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
    np.testing.assert_array_equal((jax.jit(push) if staged else push)(jnp.array(X), jnp.array(V)), 10 * V)
    assert "jvp" in calls


def test_in_numpy(seen):
    f = polybridge.wrap(torch.sin, src="torch", dst="numpy", jvp=lambda p, t: (torch.sin(p[0]), 10 * t[0]))
    np.testing.assert_array_equal(f.jvp((X,), (V,))[1], 10 * V)


def test_reverse_over_a_forward_rule_says_that_there_is_none(seen):
    f = polybridge.wrap(np.sin, src="numpy", dst="torch", jvp=seen[1])
    with pytest.raises(polybridge.NotDifferentiableError, match="`jvp=` alone"):
        torch.func.grad(lambda x: torch.func.jvp(f, (x,), (torch.tensor(V),))[1].sum())(torch.tensor(X))


def test_both_rules_serve_their_own_mode():
    rules = {"vjp": (lambda x: (x * x, x), lambda x, ct: (3 * ct,)), "jvp": lambda p, t: (p[0] * p[0], 7 * t[0])}
    f = polybridge.wrap(lambda x: x * x, src="torch", dst="jax", **rules)
    assert float(jax.grad(lambda x: f(x))(2.0 * jnp.ones(()))) == 3.0
    assert float(jax.jvp(f, (jnp.ones(()),), (jnp.ones(()),))[1]) == 7.0


@pytest.mark.parametrize("module", ["torch", "jax"])
def test_in_a_batch_the_rule_serves_each_example(module):
    rules = {"vjp": (lambda x: (x * x, x), lambda x, ct: (5 * ct,)), "jvp": lambda p, t: (p[0] * p[0], 7 * t[0])}
    f = polybridge.wrap(lambda x: x * x, src="numpy", dst=module, **rules)
    with pytest.warns(polybridge.LoopWarning):
        if module == "jax":
            found = jax.vmap(lambda x: jax.jvp(f, (x,), (x * 0 + 1,))[1])(jnp.array(X))
        else:
            found = torch.func.vmap(lambda x: torch.func.jvp(f, (x,), (x * 0 + 1,))[1])(torch.tensor(X))
    np.testing.assert_array_equal(found, [7.0] * 3)
