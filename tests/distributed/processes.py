"""Runs programs in processes of their own; none outlives its limit, nor do those that it has started."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds; about 10 are needed


def run(*commands: Sequence[str], environments: Sequence[dict[str, str]] = ({},)) -> list[tuple[int, str]]:
    """Run Python with these arguments, all at once, and return each exit status and output.

    Args:
        commands: the arguments of each process.
        environments: what each has in its environment besides; one for all, or one for each.

    Raises:
        subprocess.TimeoutExpired: one has run for longer than the limit.
    """
    environments = list(environments) * (len(commands) if len(environments) == 1 else 1)
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**common, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                _end(process)
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()  # on which torchrun ends its workers, which are in sessions of their own
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def torchrun(*command: str, processes: int = 2) -> tuple[int, str]:
    """Run a module or program in several processes of torch."""
    launcher = "-m", "torch.distributed.run", "--nproc-per-node", str(processes)
    ((status, output),) = run([*launcher, "--master-port", str(free_port()), *command])
    return status, output


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port
