"""A PyTorch network, and how PyTorch alone trains it on whole batches."""

import numpy as np
import torch

from examples.distributed import task


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(task.FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def trained() -> list[np.ndarray]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), task.RATE)
    for x, y in task.batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return weights(net)


def weights(net: torch.nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy() for p in net.parameters()]
