"""Run 1: a Keras extractor trained from a PyTorch loop, and its twin, which is PyTorch throughout."""

import keras
import tensorflow as tf
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

import polybridge

from .data import channels_first
from .models import Weights, keras_extractor, torch_extractor, torch_head
from .training import LEARNING_RATE, MOMENTUM, Learner, Step


def bridged(initial: Weights) -> Learner:
    """Keras features, a PyTorch head: one PyTorch loss, an optimiser on either side."""
    extractor = keras_extractor(initial.extractor)
    variables = extractor.trainable_variables
    extractor_optimizer = keras.optimizers.SGD(LEARNING_RATE, MOMENTUM)

    head = torch_head(initial.head)
    head_optimizer = torch.optim.SGD(head.parameters(), LEARNING_RATE, MOMENTUM)

    def keras_features(weights, images):
        features, _ = extractor.stateless_call(weights, [], images)
        return features

    features = polybridge.wrap(keras_features, src="tf", dst="torch")  # the seam

    def weights():
        return polybridge.convert([tf.convert_to_tensor(variable) for variable in variables], "torch")

    def step(images, labels):
        leaves = [weight.requires_grad_() for weight in weights()]
        logits = head(features(leaves, torch.from_numpy(images)))
        loss = cross_entropy(logits, torch.from_numpy(labels))

        head_optimizer.zero_grad()
        loss.backward()  # through the head, then through Keras
        head_optimizer.step()

        gradients = [leaf.grad for leaf in leaves]
        extractor_optimizer.apply(polybridge.convert(gradients, "tf"), variables)
        return Step(loss.item(), _norm(gradients), _norm([p.grad for p in head.parameters()]))

    @torch.no_grad()
    def logits(images):
        return head(features(weights(), torch.from_numpy(images))).numpy()

    return Learner(step, logits)


def native(initial: Weights) -> Learner:
    """The same network with nothing to cross."""
    extractor, head = torch_extractor(initial.extractor), torch_head(initial.head)
    model = nn.Sequential(extractor, head)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    def step(images, labels):
        logits = model(torch.from_numpy(channels_first(images)))
        loss = cross_entropy(logits, torch.from_numpy(labels))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        norms = [_norm([p.grad for p in half.parameters()]) for half in (extractor, head)]
        return Step(loss.item(), *norms)

    @torch.no_grad()
    def logits(images):
        return model(torch.from_numpy(channels_first(images))).numpy()

    return Learner(step, logits)


def _norm(gradients) -> float:
    return get_total_norm(gradients).item()
