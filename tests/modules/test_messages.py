"""Asks that errors of bridged modules name weights as users do, and say where random numbers come from."""

import re

import equinox as eqx
import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from flax import linen, nnx

import polybridge

KEY = jax.random.key(0)

# Random numbers.


class OfEquinox(eqx.Module):
    """Dropout."""

    drop: eqx.nn.Dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.drop(x, key=key)


class OfFlax(nnx.Module):
    """Dropout, whose generator comes with the call."""

    def __init__(self):
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs=None):
        return self.drop(x, rngs=rngs)


class OfLinen(linen.Module):
    """Dropout."""

    @linen.compact
    def __call__(self, x, training=True):
        return linen.Dropout(0.5, deterministic=not training)(x)


def with_key(params, x, *, key):
    """Draw from a key that polybridge does not know of."""
    return x * params["w"] * jax.random.bernoulli(key, 0.5, x.shape)


WEIGHTS = {"w": jnp.ones(64, jnp.float32)}
SOURCES = {
    "equinox": lambda dst: polybridge.wrap(OfEquinox(), dst=dst),
    "flax": lambda dst: polybridge.wrap(OfFlax(), dst=dst),
    "linen": lambda dst: polybridge.wrap(OfLinen().apply, src="jax", params={}, dst=dst),
    "key": lambda dst: polybridge.wrap(with_key, src="jax", params=WEIGHTS, dst=dst),
    "torch": lambda dst: polybridge.wrap(torch.nn.Dropout(0.5), dst=dst),
}
NOTE = r"The random numbers of a bridged module follow in JAX from `rng=key` in the call"


def noted(caught):
    """Whether the error says where random numbers come from."""
    return any(re.match(NOTE, note) for note in caught.value.__notes__)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("source", "given", "error"),
    [
        ("equinox", {}, RuntimeError),
        ("equinox", {"rngs": {"dropout": KEY}}, TypeError),
        ("flax", {}, ValueError),
        ("flax", {"key": KEY}, TypeError),
        ("linen", {}, Exception),
        ("linen", {"rng": KEY}, Exception),
        ("key", {}, TypeError),
        ("key", {"rng": KEY}, TypeError),
        ("torch", {"rngs": 3}, TypeError),
        ("torch", {"key": 3}, TypeError),
    ],
)
def test_a_key_under_another_name_or_none_is_told_of_rng(source, given, error, compiled):
    apply, params, state = SOURCES[source]("jax")

    def call(x):
        return apply(params, state, x, training=True, **given)[0]

    with pytest.raises(error) as caught:
        (jax.jit(call) if compiled else call)(jnp.ones(64))
    assert noted(caught)


@pytest.mark.parametrize("source", ["equinox", "flax", "torch"])
def test_what_the_note_says_works(source):
    apply, params, state = SOURCES[source]("jax")
    out, _ = apply(params, state, jnp.ones(64), training=True, rng=KEY)
    assert set(np.unique(out)) == {0, 2}


def test_what_the_page_says_of_linen_works():
    net = OfLinen()

    def fn(params, x, rng=None, training=False):
        return net.apply(params, x, training, rngs={"dropout": rng})

    module = polybridge.wrap(fn, src="jax", params={}, dst="torch")
    assert set(np.unique(module(torch.ones(64)))) == {0, 2}
    assert module.eval()(torch.ones(64)).tolist() == [1.0] * 64


@pytest.mark.parametrize("given", [{"key": KEY}, {"rngs": nnx.Rngs(0)}, {"rng": jax.random.key_data(KEY)}])
@pytest.mark.parametrize(("dst", "x"), [("torch", torch.ones(64)), ("tf", tf.ones(64))])
def test_a_key_for_a_module_of_another_framework_is_to_be_left_out(dst, x, given):
    module = SOURCES["equinox"](dst)
    (name,) = given
    with pytest.raises(polybridge.WrongFrameworkError, match=rf"seed of \w+: leave kwargs\['{name}'\] out"):
        module(x, **given)


@pytest.mark.parametrize("given", [{}, {"key": KEY}, {"rngs": nnx.Rngs(0)}])
def test_keras_errors_are_told_where_random_numbers_come_from(given):
    with pytest.raises((TypeError, ValueError, flax.errors.InvalidRngError)) as caught:
        SOURCES["linen"]("keras")(tf.ones(64), training=True, **given)
    assert noted(caught)


def test_an_argument_of_the_modules_own_is_no_key():
    class Attention(torch.nn.Module):
        def forward(self, query, key):
            return query * key

    apply, params, state = polybridge.wrap(Attention(), dst="jax")
    assert apply(params, state, jnp.ones(2), key=jnp.full(2, 3.0))[0].tolist() == [3.0, 3.0]
    with pytest.raises(polybridge.WrongFrameworkError, match=r"convert\(kwargs\['key'\], \"jax\"\)"):
        apply(params, state, jnp.ones(2), key=torch.ones(2))


def test_an_error_about_something_else_has_no_note():
    def fn(params, x):
        raise KeyError("w")

    with pytest.raises(KeyError) as caught:
        polybridge.wrap(fn, src="jax", params=WEIGHTS, dst="torch")(torch.ones(2))
    assert not any("random" in note for note in getattr(caught.value, "__notes__", ()))


# Names.


@pytest.fixture(scope="module")
def net():
    """A module with a weight, a statistic and a counter, as `(apply, params, state)`."""
    torch.manual_seed(0)
    return polybridge.wrap(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), dst="jax")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "0.weight",
            torch.ones(2, 3),
            polybridge.WrongFrameworkError,
            r"the weight '0.weight' is a torch.Tensor.*\(x, ",
        ),
        (
            "1.running_mean",
            torch.ones(2),
            polybridge.WrongFrameworkError,
            "the state '1.running_mean' is a torch.Tensor",
        ),
        (
            "0.weight",
            jnp.ones((2, 3), "float8_e4m3fn"),
            polybridge.UnsupportedTensorError,
            "the weight '0.weight' cannot",
        ),
        ("0.bias", None, polybridge.WeightsError, "the weight 0.bias has shape None"),
    ],
    ids=["foreign", "state", "dtype", "none"],
)
def test_a_weight_has_its_name_in_messages(net, name, value, error, message, compiled):
    params, state = ({k: value if k == name else x for k, x in tree.items()} for tree in net[1:])

    def call(x):
        return net.apply(params, state, x)

    with pytest.raises(error, match=message) as caught:
        (jax.jit(call) if compiled else call)(jnp.ones((4, 3)))
    assert "_weights" not in str(caught.value)


def test_a_write_to_a_weight_has_its_name():
    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.writes = torch.nn.Parameter(torch.ones(3)), False

        def forward(self, x):
            if self.writes:
                self.weight.detach().mul_(2)
            return x * self.weight

    source = Writes()
    apply, params, state = polybridge.wrap(source, dst="jax")
    for _ in range(3):
        apply(params, state, jnp.ones(3))
    source.writes = True
    with pytest.raises(polybridge.MutationError, match="wrote in place to the weight 'weight'"):
        apply(params, state, jnp.ones(3))


class Grows(torch.nn.Module):
    """Has a counter that JAX cannot hold after the call, and may return what nobody can."""

    def __init__(self, returned=None):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.returned = returned

    def forward(self, x):
        if self.returned is None:
            self.count += 2**40
            return {"y": x}
        return {"y": x, "z": self.returned}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_state_that_does_not_fit_has_its_name(compiled):
    apply, params, state = polybridge.wrap(Grows(), dst="jax")

    def call(x):
        return apply(params, state, x, training=True)[1]["count"]

    with jax.enable_x64(False), pytest.raises(Exception, match=r"the state 'count' cannot cross.*do not fit"):
        jax.block_until_ready((jax.jit(call) if compiled else call)(jnp.ones(2)))


def test_a_buffer_that_does_not_fit_has_its_name_when_it_is_wrapped():
    source = Grows()
    source.count += 2**40
    with (
        jax.enable_x64(False),
        pytest.raises(polybridge.UnsupportedTensorError, match=r"`Grows`: .*'count' cannot cross"),
    ):
        polybridge.wrap(source, dst="jax")


@pytest.mark.parametrize("traced", [False, True])
def test_a_result_has_the_path_that_the_module_gave_it(traced):
    module = polybridge.wrap(Grows(jnp.ones(2)), dst="tf")
    with pytest.raises(polybridge.OutputError, match=r" at result\['z'\]\. Return torch tensors"):
        (tf.function(lambda x: module(x)["y"]) if traced else module)(tf.ones(2))


def test_a_broken_promise_has_the_path_that_the_module_gave_it():
    specs = {"y": polybridge.TensorSpec((3,), "float32")}
    module = polybridge.wrap(Grows(), dst="tf", output_specs=specs)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"float32\[2\] at result\['y'\], but float32\[3\]"):
        tf.function(lambda x: module(x)["y"])(tf.ones(2))
