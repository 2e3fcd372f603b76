"""Keras models that an import finds, as files of bridged modules name them."""

import keras
import tensorflow as tf


def mlp(width=8):
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(2)])


def normalised(dtype="float32"):
    return keras.Sequential(
        [
            keras.layers.Input((4,), dtype=dtype),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )


def dropping(layers=1):
    return keras.Sequential([keras.layers.Input((64,)), *(keras.layers.Dropout(0.5) for _ in range(layers))])


class Tied(keras.Model):
    """An autoencoder whose decoder is the encoder's kernel, transposed."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(3, use_bias=False, name="encoder")

    def build(self, shape):
        self.encoder.build(shape)

    def call(self, x):
        return keras.ops.matmul(self.encoder(x), keras.ops.transpose(self.encoder.kernel))


class Late(keras.Model):
    """Two layers that are built by the first call."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, "tanh")
        self.norm = keras.layers.BatchNormalization()
        self.second = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.second(self.norm(self.first(x), training=training))


class Affine(tf.Module):
    """Weights that are there from the start."""

    def __init__(self, size=3, dtype=tf.float32):
        super().__init__()
        self.w = tf.Variable(tf.reshape(tf.range(size * size, dtype=dtype) / 10, (size, size)), name="w")
        self.b = tf.Variable(tf.ones(size, dtype))

    @tf.function
    def __call__(self, x):
        return x @ self.w + self.b
