"""Runs Python in processes of their own, for what could hang or abort; and what such processes import."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import polybridge

ROOT = Path(__file__).parents[2]


def run(code: str, seconds: float = 60) -> str:
    """Return what the code prints; fail with its traces when it fails, aborts or takes too long."""
    prelude = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds + 30, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


def squares_in_torch(values: list[float]) -> list[float]:
    """Return squares by a TensorFlow function in torch."""
    import tensorflow as tf

    return polybridge.wrap(tf.square, src="tf", dst="torch")(torch.tensor(values)).tolist()


class Squares(torch.utils.data.Dataset):
    """A dataset whose items are computed by TensorFlow."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(squares_in_torch([float(index)]))
