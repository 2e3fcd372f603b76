"""Run 2: a PyTorch extractor trained from a TensorFlow loop, and its twin, which is Keras throughout."""

from typing import Any

import keras
import tensorflow as tf
import torch
from torch.func import functional_call

import polybridge

from .data import Images, Labels, channels_first
from .models import Weights, keras_extractor, keras_head, torch_extractor
from .training import LEARNING_RATE, MOMENTUM, Learner, Logits, Step

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bridged(initial: Weights) -> Learner:
    """PyTorch features, a Keras head: one Keras loss, an optimiser on either side."""
    extractor = torch_extractor(initial.extractor)
    parameters = dict(extractor.named_parameters())
    extractor_optimizer = torch.optim.SGD(parameters.values(), LEARNING_RATE, MOMENTUM)

    head = keras_head(initial.head)
    head_optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)

    def torch_features(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        return functional_call(extractor, weights, (images,))

    features = polybridge.wrap(torch_features, src="torch", dst="tf")  # the seam

    @tf.function
    def train_step(weights: dict[str, tf.Tensor], images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = cross_entropy(labels, head(features(weights, images)))
        # through the head, then through PyTorch
        gradients, head_gradients = tape.gradient(loss, (weights, head.trainable_variables))
        head_optimizer.apply(head_gradients, head.trainable_variables)
        return loss, gradients, tf.linalg.global_norm(head_gradients)

    def step(images: Images, labels: Labels) -> Step:
        weights = polybridge.convert(parameters, "tf")
        loss, gradients, head_norm = train_step(weights, channels_first(images), labels)

        for name, gradient in polybridge.convert(gradients, "torch").items():
            parameters[name].grad = gradient
        extractor_optimizer.step()
        return Step(float(loss), float(tf.linalg.global_norm(list(gradients.values()))), float(head_norm))

    def logits(images: Images) -> Logits:
        return head(features(polybridge.convert(parameters, "tf"), channels_first(images))).numpy()

    return Learner(step, logits)


def native(initial: Weights) -> Learner:
    """The same network with nothing to cross."""
    extractor, head = keras_extractor(initial.extractor), keras_head(initial.head)
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
        return Step(*map(float, train_step(images, labels)))

    def logits(images: Images) -> Logits:
        return model(images).numpy()

    return Learner(step, logits)
