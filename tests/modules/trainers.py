"""Training loops of torch, TensorFlow and JAX, which train native modules and bridged ones and cannot tell them apart.

A generator and its critic are trained in turns, the critic with a penalty on its gradient (Gulrajani et al. 2017),
which takes second derivatives through the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf
import torch
from torch.nn import functional as F

# Exact in binary: Keras holds its rate in float32.
RATES = {"classify": 1 / 16, "reconstruct": 1 / 16, "compete": 1 / 256}
MOMENTUM = 7 / 8
PENALTY = 10.0

Batches = Iterable[tuple[tuple[Any, ...], Any]]


def in_torch(kind: str, modules: list[Any], batches: Batches) -> None:
    """Train `torch.nn.Module`s in place."""
    optimizers = [torch.optim.SGD(m.parameters(), RATES[kind], MOMENTUM) for m in modules]
    for m in modules:
        m.train()

    def step(loss: Any, optimizer: Any) -> None:
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        optimizer.step()

    for arrays, target in batches:
        inputs, labels = [torch.from_numpy(x) for x in arrays], torch.from_numpy(target)
        if kind == "classify":
            step(F.cross_entropy(modules[0](*inputs), labels), optimizers[0])
        elif kind == "reconstruct":
            step(F.mse_loss(modules[0](*inputs), inputs[0]), optimizers[0])
        else:
            (generator, critic), (real, noise, mix) = modules, inputs
            mixed = (mix * real + (1 - mix) * generator(noise).detach()).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
            step(critic(generator(noise).detach()).mean() - critic(real).mean() + PENALTY * penalty, optimizers[1])
            step(-critic(generator(noise)).mean(), optimizers[0])


def in_tensorflow(kind: str, modules: list[Any], batches: Batches) -> None:
    """Train Keras layers or models in place, in a graph."""
    optimizers = [keras.optimizers.SGD(RATES[kind], MOMENTUM) for _ in modules]
    for m, optimizer in zip(modules, optimizers, strict=True):
        optimizer.build(m.trainable_variables)

    def descend(which: int, tape: tf.GradientTape, loss: Any) -> None:
        variables = modules[which].trainable_variables
        optimizers[which].apply(tape.gradient(loss, variables), variables)

    @tf.function
    def step(inputs: list[Any], labels: Any) -> None:
        if kind != "compete":
            with tf.GradientTape() as tape:
                out = modules[0](*inputs, training=True)
                if kind == "classify":
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, out)
                else:
                    losses = tf.square(out - inputs[0])
                loss = tf.reduce_mean(losses)
            descend(0, tape, loss)
            return
        (generator, critic), (real, noise, mix) = modules, inputs
        with tf.GradientTape() as tape:
            made = tf.stop_gradient(generator(noise, training=True))
            mixed = mix * real + (1 - mix) * made
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                total = tf.reduce_sum(critic(mixed, training=True))
            slope = inner.gradient(total, mixed)
            penalty = tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-12) - 1))
            loss = tf.reduce_mean(critic(made, training=True)) - tf.reduce_mean(critic(real, training=True))
            loss += PENALTY * penalty
        descend(1, tape, loss)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise, training=True), training=True))
        descend(0, tape, loss)

    for arrays, target in batches:
        step([tf.constant(x) for x in arrays], tf.constant(target))


def in_jax(kind: str, triples: list[Any], batches: Batches) -> list[tuple[Any, Any]]:
    """Train `(apply, params, state)`s, and return the trained `(params, state)` of each."""
    applies = [apply for apply, _, _ in triples]
    optimizer = optax.sgd(RATES[kind], MOMENTUM)
    carried = [(params, state, optimizer.init(params)) for _, params, state in triples]

    def descend(carry: Any, loss: Any) -> Any:
        params, state, moments = carry
        (_, state), gradient = jax.value_and_grad(loss, has_aux=True)(params, state)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(params, updates), state, moments

    def run(which: int, carry: Any, *inputs: Any) -> Any:
        params, state, _ = carry
        return applies[which](params, state, *inputs, training=True)[0]

    @jax.jit
    def step(carried: Any, inputs: Any, labels: Any) -> Any:
        if kind != "compete":

            def loss(params: Any, state: Any) -> Any:
                out, state = applies[0](params, state, *inputs, training=True)
                if kind == "classify":
                    return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean(), state
                return jnp.square(out - inputs[0]).mean(), state

            return [descend(carried[0], loss)]

        real, noise, mix = inputs
        generator, critic = carried
        made = run(0, generator, noise)

        def criticise(params: Any, state: Any) -> Any:
            def critique(x: Any) -> Any:
                return applies[1](params, state, x, training=True)[0]

            slope = jax.grad(lambda x: critique(x).sum())(mix * real + (1 - mix) * made)
            penalty = jnp.square(jnp.sqrt(jnp.square(slope).sum(1) + 1e-12) - 1).mean()
            return critique(made).mean() - critique(real).mean() + PENALTY * penalty, state

        critic = descend(critic, criticise)

        def fool(params: Any, state: Any) -> Any:
            out, state = applies[0](params, state, noise, training=True)
            return -run(1, critic, out).mean(), state

        return [descend(generator, fool), critic]

    for arrays, target in batches:
        carried = step(carried, [jnp.asarray(x) for x in arrays], jnp.asarray(target))
    return [(params, state) for params, state, _ in carried]


def weights_of(modules: list[Any]) -> list[Any]:
    """Return copies of all weights and statistics of torch modules or Keras models."""
    found = []
    for m in modules:
        if isinstance(m, torch.nn.Module):
            found += [x.detach().numpy().copy() for x in (*m.parameters(), *m.buffers())]
        else:
            found += [np.array(v.value) for v in m.weights]
    return found
