"""A process that dies in a bridged model takes the others with it, by the engine's own means and within its time."""

import signal

import pytest

from tests.distributed.processes import free_port, run, torchrun

PROGRAM = "-m", "tests.distributed.dying"


def test_the_other_process_of_torch_ends():
    status, output = torchrun(*PROGRAM, "kill", "1", "torch_ddp")
    assert status == 1, output
    assert "weights differ" not in output
    assert "Signal 9" in output


@pytest.mark.parametrize("way", ["raise", "kill"])
def test_the_other_worker_of_tensorflow_ends(way):
    workers = [f"localhost:{free_port()}" for _ in range(2)]
    found = run(*([*PROGRAM, way, "1", "tf_workers", *workers, str(number)] for number in range(2)))
    check(way, *found)


def test_the_other_process_of_jax_ends():
    coordinator = f"localhost:{free_port()}"
    found = run(*([*PROGRAM, "kill", "1", "jax_processes", coordinator, str(number)] for number in range(2)))
    check("kill", *found)


def check(way, other, victim):
    status, output = victim
    assert status == -signal.SIGKILL if way == "kill" else "the model dies here" in output, output
    status, output = other
    assert status != 0, output
    assert "weights differ" not in output
