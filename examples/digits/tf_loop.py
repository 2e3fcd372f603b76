"""Run 2: a PyTorch extractor trained from a TensorFlow loop, and its twin, which is Keras throughout."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import polybridge

from .data import Images, Labels, channels_first
from .models import Weights, keras_extractor, keras_head, torch_extractor
from .training import LEARNING_RATE, MOMENTUM, Learner, Logits, Step

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bridged(initial: Weights) -> Learner:
    """PyTorch features, a Keras head."""
    extractor = polybridge.wrap(torch_extractor(initial.extractor), dst="keras")  # the seam: a Keras layer
    return _learner(extractor, keras_head(initial.head), channels_first)


def native(initial: Weights) -> Learner:
    """The same network with nothing to cross."""
    return _learner(keras_extractor(initial.extractor), keras_head(initial.head), lambda images: images)


def _learner(extractor: keras.Layer, head: keras.Layer, layout: Callable[[Images], Images]) -> Learner:
    model = keras.Sequential([extractor, head])
    optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images))
        gradients = tape.gradient(loss, (extractor.trainable_variables, head.trainable_variables))
        optimizer.apply([*gradients[0], *gradients[1]], model.trainable_variables)
        return loss, *(tf.linalg.global_norm(half) for half in gradients)

    def step(images: Images, labels: Labels) -> Step:
        return Step(*map(float, train_step(layout(images), labels)))

    def logits(images: Images) -> Logits:
        return model(layout(images)).numpy()

    return Learner(step, logits)
