"""Run 1: a Keras extractor trained from a PyTorch loop, and its twin, which is PyTorch throughout."""

from collections.abc import Iterable

import keras
import tensorflow as tf
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

import polybridge

from .data import Images, Labels, channels_first
from .models import Weights, keras_extractor, torch_extractor, torch_head
from .training import LEARNING_RATE, MOMENTUM, Learner, Logits, Step


def bridged(initial: Weights) -> Learner:
    """Keras features, a PyTorch head: one PyTorch loss, an optimiser on either side."""
    extractor = keras_extractor(initial.extractor)
    variables = extractor.trainable_variables
    extractor_optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)

    head = torch_head(initial.head)
    head_optimizer = torch.optim.SGD(head.parameters(), LEARNING_RATE, MOMENTUM)

    @tf.function
    def keras_features(weights: list[tf.Tensor], images: tf.Tensor) -> tf.Tensor:
        features, _ = extractor.stateless_call(weights, [], images)
        return features

    features = polybridge.wrap(keras_features, src="tf", dst="torch")  # the seam

    def step(images: Images, labels: Labels) -> Step:
        weights = [weight.requires_grad_() for weight in polybridge.convert(variables, "torch")]
        logits = head(features(weights, images))
        loss = cross_entropy(logits, torch.from_numpy(labels))

        head_optimizer.zero_grad()
        loss.backward()  # through the head, then through Keras
        head_optimizer.step()

        gradients = polybridge.convert([weight.grad for weight in weights], "tf")
        extractor_optimizer.apply(gradients, variables)
        return Step(loss.item(), _gradient_norm(weights), _gradient_norm(head.parameters()))

    @torch.no_grad()
    def logits(images: Images) -> Logits:
        return head(features(polybridge.convert(variables, "torch"), images)).numpy()

    return Learner(step, logits)


def native(initial: Weights) -> Learner:
    """The same network with nothing to cross."""
    extractor, head = torch_extractor(initial.extractor), torch_head(initial.head)
    model = nn.Sequential(extractor, head)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    def step(images: Images, labels: Labels) -> Step:
        logits = model(torch.from_numpy(channels_first(images)))
        loss = cross_entropy(logits, torch.from_numpy(labels))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        return Step(loss.item(), *(_gradient_norm(half.parameters()) for half in (extractor, head)))

    @torch.no_grad()
    def logits(images: Images) -> Logits:
        return model(torch.from_numpy(channels_first(images))).numpy()

    return Learner(step, logits)


def _gradient_norm(weights: Iterable[torch.Tensor]) -> float:
    return get_total_norm([weight.grad for weight in weights if weight.grad is not None]).item()
