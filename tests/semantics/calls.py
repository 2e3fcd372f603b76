"""The two directions, and a value with its gradient, for the tests of this folder."""

import tensorflow as tf

import polybridge


def to_tf(fn, **options):
    """Wrap a torch function for TensorFlow."""
    return polybridge.wrap(fn, src="torch", dst="tf", **options)


def to_torch(fn, **options):
    """Wrap a TensorFlow function for torch."""
    return polybridge.wrap(fn, src="tf", dst="torch", **options)


def with_gradient(fn, x):
    """Return value and gradient of the sum of `fn(x)`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    return y, tape.gradient(y, x)
