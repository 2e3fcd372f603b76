"""A PyTorch module in TensorFlow's `MirroredStrategy`, over two devices: by Keras's `fit`, and in a loop of one's own.

python -m examples.distributed.tf_mirrored
"""

import keras
import tensorflow as tf
import torch

import polybridge
from examples.distributed import task, torch_net


def by_fit(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> torch.nn.Module:
    """Train as a Keras layer."""
    with strategy.scope():  # where variables are made for each device
        layer = polybridge.wrap(torch_net.network(), dst="keras")
        model = keras.Sequential([keras.Input([task.FEATURES]), layer])
        model.compile(keras.optimizers.SGD(task.RATE), "mse")
    model.fit(batches, verbose=0)
    return layer.sync_to_source()


def by_loop(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> torch.nn.Module:
    """Train as a `tf.Module`."""
    with strategy.scope():
        model = polybridge.wrap(torch_net.network(), dst="tf")

    def step(x: tf.Tensor, y: tf.Tensor) -> None:  # of one device, with its part of the batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / task.BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(task.RATE * gradient)

    @tf.function
    def all_steps(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(step, (x, y))

    for x, y in strategy.experimental_distribute_dataset(batches):
        all_steps(x, y)
    return model.sync_to_source()


def dataset() -> tf.data.Dataset:
    """Return whole batches, which TensorFlow splits."""
    x, y = (tf.concat(parts, 0) for parts in zip(*task.batches(), strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(task.BATCH)


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for train in (by_fit, by_loop):
        trained = train(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), dataset())
        task.report(train.__name__, torch_net.weights(trained), torch_net.trained())


if __name__ == "__main__":
    main()
