"""What torch does to tensors in a distributed run, in one of two processes; fails by an exception.

torchrun --nproc-per-node 2 -m tests.distributed.in_a_group
"""

import os
from datetime import timedelta

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import polybridge
from polybridge import ResidualError, UnsupportedTensorError

SQUARE = polybridge.wrap(lambda x: jnp.sin(x) ** 2, src="jax", dst="torch")


class Squared(torch.nn.Module):
    """Calls a wrapped function, and not a module, with a weight that FSDP frees."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x):
        return x * SQUARE(self.weight)


def a_dtensor_is_refused(mesh):
    spread = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    for x in (spread, spread.clone().requires_grad_()):
        with pytest.raises(UnsupportedTensorError, match=r"args\[0\].*a DTensor.*full_tensor"):
            SQUARE(x)
    with pytest.raises(UnsupportedTensorError, match="a DTensor"):
        polybridge.convert(spread, "jax")
    torch.testing.assert_close(SQUARE(spread.full_tensor()), torch.arange(4.0).sin() ** 2)


def a_collective_is_awaited():
    summed = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    torch.testing.assert_close(SQUARE(summed), torch.full((3,), 2.0).sin() ** 2)


def a_freed_input_is_noticed(mesh):
    model = torch.nn.Sequential(Squared(), torch.nn.Linear(4, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(3):  # lent on copies at first
        loss = model(torch.ones(4)).sum()
        try:
            loss.backward()
        except ResidualError as error:
            assert "has been freed" in str(error)
            return
    raise AssertionError("nobody noticed")


def weights_are_gathered_and_spread(mesh):
    source = {"w": jnp.arange(4.0)}
    module = polybridge.wrap(lambda params, x: params["w"] * x, src="jax", dst="torch", params=source)
    fully_shard(module, mesh=mesh)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.mul_(2)
    assert module.sync_to_source()["w"].tolist() == [0, 2, 4, 6]
    with torch.no_grad():
        weight.zero_()
    module.sync_from_source()
    assert weight.full_tensor().tolist() == [0, 2, 4, 6]


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = dist.init_device_mesh("cpu", (2,))
    a_dtensor_is_refused(mesh)
    a_collective_is_awaited()
    weights_are_gathered_and_spread(mesh)
    a_freed_input_is_noticed(mesh)
    print("done", flush=True)
    dist.barrier()
    os._exit(0)  # DTensor's caches keep the group, whose threads drop tensors and so abort a Python that ends
