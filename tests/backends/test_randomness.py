"""What torch's generators are captured as: the same numbers again, kept once however many residuals refer to them."""

import pytest

pytest.importorskip("torch")

import torch

from polybridge.core.registry import get_backend


@pytest.fixture
def backend():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield get_backend("torch")


def test_captured_randomness_gives_the_same_numbers_again(backend):
    captured = backend.randomness()
    first = torch.rand(3)
    with captured():
        assert torch.equal(torch.rand(3), first)
    with captured():
        assert torch.equal(torch.rand(3), first)


def test_numbers_drawn_in_captured_randomness_are_not_drawn_outside(backend):
    captured = backend.randomness()
    before = torch.get_rng_state()
    with captured():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_captured_randomness_is_shared_while_nobody_draws(backend):
    assert backend.randomness() is backend.randomness()


def test_captured_randomness_is_another_once_somebody_has_drawn(backend):
    before = backend.randomness()
    torch.rand(1)
    assert backend.randomness() is not before
