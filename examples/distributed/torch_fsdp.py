"""A Keras model in PyTorch's FSDP2: each of two processes holds half of every weight.

torchrun --nproc-per-node 2 -m examples.distributed.torch_fsdp
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import polybridge
from examples.distributed import keras_net, task


class Model(torch.nn.Module):
    """The bridged network between layers of PyTorch, which change nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = polybridge.wrap(keras_net.network(), dst="torch")
        self.head = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    fully_shard(model.body, mesh=mesh)  # gathered for the forward, freed after it, gathered again for the backward
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), task.RATE)
    for x, y in task.batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    task.report("fully_shard", model.body.sync_to_source().get_weights(), keras_net.trained())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
