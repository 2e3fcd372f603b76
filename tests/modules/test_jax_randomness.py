"""Asks that the random numbers of a module in JAX follow from the key of the call, and from nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

KEYS = {"typed": jax.random.key, "old": jax.random.PRNGKey}


class Scaled(torch.nn.Module):
    """Dropout of a scaled input: the gradient of the scale shows the mask of the backward."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return torch.nn.functional.dropout(x * self.scale, 0.5, self.training)


class Noise(torch.nn.Module):
    """Draws in evaluation too."""

    def forward(self, x):
        return x + torch.randn(64)


@pytest.fixture
def drop():
    """`drop(key, scale)`: the result for ones."""
    apply, params, state = polybridge.wrap(Scaled(), dst="jax")

    def drop(key, scale=params["scale"]):
        return apply({"scale": scale}, state, jnp.ones(64), rng=key, training=True)[0]

    return drop


def gradient(drop):
    """The gradient of the sum of the result in the scale, which is the mask of the backward, beside the forward's."""

    def both(key, scale):
        return jax.value_and_grad(lambda s: (lambda out: (out.sum(), out))(drop(key, s)), has_aux=True)(scale)

    return both


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KEYS)
def test_the_mask_follows_from_the_key(drop, kind, compiled):
    run = jax.jit(drop) if compiled else drop
    same, again, other = run(KEYS[kind](1)), run(KEYS[kind](1)), run(KEYS[kind](2))
    np.testing.assert_array_equal(same, again)
    assert (same != other).any()
    assert set(np.unique(same)) == {0, 2}


def test_compiled_and_eager_masks_are_the_same(drop):
    np.testing.assert_array_equal(jax.jit(drop)(jax.random.key(3)), drop(jax.random.key(3)))


def test_torch_keeps_its_own_generator(drop):
    before = torch.get_rng_state()
    drop(jax.random.key(0))
    jax.jit(drop)(jax.random.key(0)).block_until_ready()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_the_backward_has_the_mask_of_the_forward(drop, compiled):
    both = jax.jit(gradient(drop)) if compiled else gradient(drop)
    for seed in range(3):
        (_, out), mask = both(jax.random.key(seed), jnp.ones(64))
        np.testing.assert_array_equal(mask, out)


def test_checkpoint_draws_the_same_mask_again(drop):
    checked = jax.checkpoint(drop)
    for seed in range(3):
        (_, out), mask = jax.jit(gradient(checked))(jax.random.key(seed), jnp.ones(64))
        np.testing.assert_array_equal(mask, out)
        np.testing.assert_array_equal(out, drop(jax.random.key(seed)))


def test_each_step_of_a_scan_has_its_own_mask(drop):
    def step(scale, key):
        (_, out), mask = gradient(drop)(key, scale)
        return scale, (out, mask)

    keys = jax.random.split(jax.random.key(0), 4)
    _, (outs, masks) = jax.jit(lambda: jax.lax.scan(step, jnp.ones(64), keys))()
    np.testing.assert_array_equal(outs, masks)
    np.testing.assert_array_equal(outs, jnp.stack([drop(key) for key in keys]))
    assert len(np.unique(outs, axis=0)) == 4


@pytest.mark.filterwarnings("ignore::polybridge.LoopWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_each_example_with_its_own_key_has_its_own_mask(drop, compiled):
    keys = jax.random.split(jax.random.key(0), 4)
    mapped = jax.vmap(gradient(drop), in_axes=(0, None))
    (_, outs), masks = (jax.jit(mapped) if compiled else mapped)(keys, jnp.ones(64))
    np.testing.assert_array_equal(outs, masks)
    np.testing.assert_array_equal(outs, jnp.stack([drop(key) for key in keys]))
    assert len(np.unique(outs, axis=0)) == 4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_examples_that_share_a_key_share_the_mask(drop, compiled):
    """As those of JAX's own functions do."""
    key = jax.random.key(0)
    mapped = jax.vmap(lambda scale: gradient(drop)(key, scale))
    (_, outs), masks = (jax.jit(mapped) if compiled else mapped)(jnp.ones((4, 64)))
    np.testing.assert_array_equal(outs, masks)
    np.testing.assert_array_equal(outs, jnp.stack([drop(key)] * 4))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("module", "training"), [(Scaled, True), (Noise, False)], ids=["dropout", "noise"])
def test_drawing_without_a_key_is_an_error(module, training, compiled):
    apply, params, state = polybridge.wrap(module(), dst="jax")

    def run(x):
        return apply(params, state, x, training=training)[0]

    with pytest.raises(polybridge.RandomnessError, match=rf"`{module.__name__}` draws random numbers.*`rng=key`"):
        (jax.jit(run) if compiled else run)(jnp.ones(64))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_dropout_inside_of_attention_counts(compiled):
    class Attending(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training)

    apply, params, state = polybridge.wrap(Attending(), dst="jax")
    run = jax.jit(apply, static_argnames="training") if compiled else apply
    x = jnp.ones((1, 2, 3, 8))
    np.testing.assert_allclose(run(params, state, x)[0], x, rtol=1e-6)
    with pytest.raises(polybridge.RandomnessError, match="`Attending` draws random numbers"):
        run(params, state, x, training=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_what_draws_nothing_needs_no_key(compiled):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    apply, params, state = polybridge.wrap(torch.nn.Sequential(layer, torch.nn.Dropout(0.0)), dst="jax")

    def run(x):
        return apply(params, state, x, training=True)[0]

    out = (jax.jit(run) if compiled else run)(jnp.ones((2, 3, 8)))
    np.testing.assert_allclose(out, layer(torch.ones(2, 3, 8)).detach(), rtol=1e-5, atol=1e-5)


class Dropping(tf.Module):
    def __init__(self, draw):
        super().__init__()
        self.w, self.draw = tf.Variable(tf.ones(64)), draw
        self.generator = tf.random.Generator.from_seed(0)

    def __call__(self, x, training=False):
        return self.draw(self, x * self.w) if training else x * self.w


DRAWS = {
    "eager": lambda module, x: tf.nn.dropout(x, 0.5),
    "function": tf.function(lambda module, x: tf.cond(x[0] > 0, lambda: tf.random.shuffle(x), lambda: x)),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_of_tensorflow_that_no_key_reaches_are_refused(draw, jitted):
    apply, params, state = polybridge.wrap(Dropping(DRAWS[draw]), dst="jax")
    run = jax.jit(apply, static_argnames="training") if jitted else apply
    for _ in range(2):
        with pytest.raises(polybridge.RandomnessError, match=r"tf\.random\.Generator"):
            run(params, state, jnp.ones(64), rng=jax.random.key(0), training=True)
    np.testing.assert_array_equal(run(params, state, jnp.ones(64))[0], np.ones(64))


def test_a_generator_that_is_state_is_not_refused():
    module = Dropping(lambda module, x: x * module.generator.uniform([64]))
    apply, params, state = polybridge.wrap(module, dst="jax")
    first, after = apply(params, state, jnp.ones(64), training=True)
    again, _ = apply(params, state, jnp.ones(64), training=True)
    second, _ = apply(params, after, jnp.ones(64), training=True)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)
