"""What engines do to the tensors that cross."""

from tests.distributed.processes import run, torchrun


def test_arrays_that_are_spread_over_devices_of_jax():
    ((status, output),) = run(["-m", "tests.distributed.over_devices"])
    assert (status, output.count("done")) == (0, 1), output


def test_tensors_that_are_spread_over_processes_of_torch():
    status, output = torchrun("-m", "tests.distributed.in_a_group")
    assert (status, output.count("done")) == (0, 2), output
