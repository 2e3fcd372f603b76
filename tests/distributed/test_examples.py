"""The programs of `examples/distributed` end with the weights of one process; those of `examples/trainers` learn."""

import re

import pytest

from tests.distributed.processes import free_port, run, torchrun

SAME = "weights differ by"  # and the program has failed if by more than rounding


@pytest.mark.parametrize("program", ["torch_ddp", "torch_fsdp"])
def test_two_processes_of_torch(program):
    status, output = torchrun("-m", f"examples.distributed.{program}")
    assert (status, output.count(SAME)) == (0, 2), output


def test_two_devices_of_tensorflow():
    ((status, output),) = run(["-m", "examples.distributed.tf_mirrored"])
    assert (status, output.count(SAME)) == (0, 2), output


def test_two_workers_of_tensorflow():
    workers = [f"localhost:{free_port()}" for _ in range(2)]
    for status, output in run(*(["-m", "examples.distributed.tf_workers", *workers, str(n)] for n in range(2))):
        assert (status, output.count(SAME)) == (0, 1), output


def test_four_devices_of_jax():
    ((status, output),) = run(["-m", "examples.distributed.jax_devices"])
    assert (status, output.count(SAME)) == (0, 2), output


def test_two_processes_of_jax():
    coordinator = f"localhost:{free_port()}"
    for status, output in run(*(["-m", "examples.distributed.jax_processes", coordinator, str(n)] for n in range(2))):
        assert (status, output.count(SAME)) == (0, 1), output


def test_lightning_in_bfloat16():
    ((status, output),) = run(["-m", "examples.trainers.lightning_digits", "bf16-mixed"])
    assert status == 0, output
    assert accuracies(output)[-1] > 0.85
    assert "after 55 updates" in output  # 1,408 images in 5 epochs of 11 accumulated batches


def test_accelerate_in_two_processes(tmp_path):
    status, output = torchrun("-m", "examples.trainers.accelerate_digits", str(tmp_path / "state"))
    assert status == 0, output
    assert min(accuracies(output)) > 0.85


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy (\d\.\d+)", output)]
