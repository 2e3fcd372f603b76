"""Asks that calls do not add up: nothing may be kept per call, whether or not a backward comes."""

import pytest

from benchmarks.memory import CALLS, LIMIT_MEGABYTES, MODE_NAMES, measure_in_subprocess


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_twenty_thousand_calls_leave_less_than_two_megabytes(mode, backward):
    assert CALLS == 20_000 and LIMIT_MEGABYTES == 2
    assert measure_in_subprocess("polybridge", mode, backward, CALLS) < LIMIT_MEGABYTES
