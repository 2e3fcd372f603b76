"""The digits demo keeps its promise: a seam through the network does not change how it learns."""

from itertools import islice
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

from examples.digits import data, models, tf_loop, torch_loop
from examples.digits.training import EARLY_STEPS, TOLERANCE, Comparison, History, Learner


@pytest.fixture(params=[torch_loop, tf_loop], ids=["keras in torch", "torch in tf"])
def loop(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def test_bridged_losses_equal_native_ones_for_20_steps(loop: ModuleType) -> None:
    assert early_difference(loop.bridged(INITIAL), loop.native(INITIAL)) <= TOLERANCE


def test_the_bound_notices_a_learning_rate_off_by_one_in_ten_thousand(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = loop.native(INITIAL)
    monkeypatch.setattr(loop, "LEARNING_RATE", loop.LEARNING_RATE * 1.0001)
    assert early_difference(loop.native(INITIAL), exact) > TOLERANCE


INITIAL = models.initial_weights()


def early_difference(bridged: Learner, native: Learner) -> float:
    return Comparison(("", ""), (0, 0), early_steps(bridged), early_steps(native)).early_difference


def early_steps(learner: Learner) -> History:
    batches = data.load().batches(np.random.default_rng(0))
    return History([learner.step(*batch) for batch in islice(batches, EARLY_STEPS)])
