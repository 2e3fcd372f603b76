"""A PyTorch module over four devices of JAX: in `jax.shard_map`, and in `jax.jit` alone.

python -m examples.distributed.jax_devices
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before JAX starts

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import polybridge
from examples.distributed import task, torch_net


def loss(apply, params, x, y):
    return jax.numpy.square(apply(params, {}, x, training=True)[0] - y).mean()


def by_jit(apply, mesh):
    """The gradient by `jit` alone: the module is called once, with the whole batch."""
    return lambda params, x, y: jax.grad(loss, argnums=1)(apply, params, x, y)


def by_shard_map(apply, mesh):
    """The gradient by `shard_map`: each device calls the module with its part of the batch."""

    def local(params, x, y):
        return jax.grad(lambda params: jax.lax.pmean(loss(apply, params, x, y), "data"))(params)

    whole, split = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, split, split), out_specs=whole)


def train(gradient, mesh, batches):
    """Return trained weights.

    Args:
        gradient: makes a gradient of the module's `apply` over a mesh.
        mesh: of devices.
        batches: of arrays, which are split over the mesh.
    """
    module = torch_net.network()
    bridged = polybridge.wrap(module, dst="jax")
    gradient = gradient(bridged.apply, mesh)

    @jax.jit
    def step(params, x, y):
        return jax.tree.map(lambda p, g: p - task.RATE * g, params, gradient(params, x, y))

    params = jax.device_put(bridged.params, NamedSharding(mesh, PartitionSpec()))
    for batch in batches:
        params = step(params, *batch)
    bridged.sync_to_source(params)
    return torch_net.weights(module)


def main() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    for gradient in (by_jit, by_shard_map):
        batches = [jax.device_put(batch, split) for batch in task.batches()]
        task.report(gradient.__name__, train(gradient, mesh, batches), torch_net.trained())


if __name__ == "__main__":
    main()
