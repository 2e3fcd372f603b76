"""Asks that a weight is lent without a copy where memory can be shared, and copied once a change where it cannot."""

import keras
import numpy as np
import pytest
import torch

import polybridge
from polybridge.core import exchange


def transposed(x):
    return x.t().contiguous().t()


def unaligned(x):
    flat = torch.zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


LAYOUTS = {"as it is": lambda x: x, "transposed": transposed, "unaligned": unaligned}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def module(layout):
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, use_bias=False)])
    module = polybridge.wrap(model, dst="torch")
    module.dense.kernel.data = LAYOUTS[layout](module.dense.kernel.data)
    x = torch.ones(1, 64)
    with torch.no_grad():
        for _ in range(4):
            module(x)
    return module


KERNEL = 64 * 64 * 4  # bytes


def copied(module):
    """Return how many bytes of weights were copied by one call, and check the result."""
    x = torch.ones(1, 64)
    with torch.no_grad(), polybridge.observe.count_crossings() as crossings:
        y = module(x)
    torch.testing.assert_close(y, x @ module.dense.kernel.detach(), rtol=1e-4, atol=1e-5)
    return crossings.bytes_copied - y.nbytes


def test_a_weight_that_does_not_change_is_not_copied(module):
    assert [copied(module) for _ in range(3)] == [0, 0, 0]


def test_a_change_costs_one_copy_where_memory_cannot_be_shared(module, layout):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module.dense.kernel.grad = torch.ones(64, 64)
    for _ in range(3):
        optimizer.step()
        assert [copied(module) for _ in range(3)] == [0 if layout == "as it is" else KERNEL, 0, 0]


def test_a_write_that_torch_does_not_count_is_seen(module):
    before = module.dense.kernel._version
    module.dense.kernel.data.mul_(2)
    assert module.dense.kernel._version == before
    copied(module)
    module.dense.kernel.data = module.dense.kernel.data.clone() + 1
    copied(module)


def test_other_bits_of_zero_are_a_change(module):
    with torch.no_grad():
        module.dense.kernel.zero_()
    copied(module)
    module.dense.kernel.data.neg_()
    x = torch.ones(1, 64)
    assert np.signbit(polybridge.convert(module.dense.kernel.detach(), "numpy")).all()
    with torch.no_grad():
        assert torch.equal(module(x), x @ module.dense.kernel.detach())
    copied(module)


def test_a_weight_that_dies_takes_its_copy_along(module):
    kernel = id(module.dense.kernel)
    del module.dense._parameters["kernel"]
    assert kernel not in exchange._copies
