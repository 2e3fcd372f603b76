"""A PyTorch module over two processes of JAX, with two devices each.

python -m examples.distributed.jax_processes localhost:12355 0 &
python -m examples.distributed.jax_processes localhost:12355 1
"""

import sys

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from examples.distributed import task, torch_net
from examples.distributed.jax_devices import by_shard_map, train

PROCESSES, DEVICES = 2, 2
PATIENCE = 30  # seconds after which a process that no longer answers is dead to the others


def main(coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, PROCESSES, process, heartbeat_timeout_seconds=PATIENCE)
    mesh = jax.make_mesh((PROCESSES * DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    parts = task.batches(process, PROCESSES)  # each process reads its own
    batches = [[jax.make_array_from_process_local_data(split, x) for x in part] for part in parts]
    task.report("jax.distributed", train(by_shard_map, mesh, batches), torch_net.trained())
    jax.distributed.shutdown()  # waits for the other process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
