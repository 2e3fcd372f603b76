"""A Keras model in PyTorch's `DistributedDataParallel`, over two processes.

torchrun --nproc-per-node 2 -m examples.distributed.torch_ddp
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its default arguments would keep alive
from torch.nn.parallel import DistributedDataParallel

import polybridge
from examples.distributed import keras_net, task


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # how long a process waits for a dead one
    bridged = polybridge.wrap(keras_net.network(), dst="torch")
    model = DistributedDataParallel(bridged)  # sends the weights and statistics of the first process to all
    optimizer = torch.optim.SGD(model.parameters(), task.RATE)
    for x, y in task.batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    task.report("DistributedDataParallel", bridged.sync_to_source().get_weights(), keras_net.trained())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
