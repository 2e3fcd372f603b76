"""Asks that dependencies point one way, and that the check would notice if they did not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the layering check on the tree at `root`."""
    command = [sys.executable, ROOT / "tools/check_layers.py", root]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tree(root: Path, place: str, source: str) -> Path:
    """Write one file of a synthetic polybridge, below a line that keeps it from being empty."""
    file = root / "polybridge" / place
    file.parent.mkdir(parents=True)
    file.write_text(f'"""One duty."""\n{source}\n')
    return root


def test_this_tree_keeps_its_layers():
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("core/relay.py", "import torch"),
        ("core/relay.py", "import torch.nn as nn"),
        ("core/relay.py", "from tensorflow import nest"),
        ("core/relay.py", "from polybridge.backends import torch"),
        ("core/relay.py", "from ..backends.torch import convert"),
        ("core/relay.py", "from polybridge import wrap"),
        ("core/relay.py", "def load(): import jax"),
        ("core/relay.py", "import importlib; importlib.import_module('jax.numpy')"),
        ("core/relay.py", "from importlib import import_module; import_module('jax')"),
        ("core/relay.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: import torch"),
        ("core/relay.py", "import scipy"),
        ("__init__.py", "from polybridge.backends.torch import backend"),
        ("__init__.py", "from . import testing"),
        ("backends/__init__.py", "from polybridge.backends import torch"),
        ("backends/torch/convert.py", "import tensorflow"),
        ("backends/torch/convert.py", "from polybridge.backends.tensorflow import convert"),
        ("backends/torch/convert.py", "import torchvision"),
        ("backends/torch/convert.py", "from polybridge import wrap"),
        ("backends/tensorflow/convert.py", "import torch"),
        ("backends/jax/convert.py", "import torch"),
        ("backends/numpy/convert.py", "import jax"),
        ("backends/torch/__init__.py", "import torch"),
        ("backends/torch/__init__.py", "from polybridge.backends.torch import backend"),
        ("backends/torch/__init__.py", "try: import torch\nexcept ImportError: pass"),
        ("observe/plots.py", "import matplotlib"),
        ("observe/crossings.py", "def load(): import torch"),
        ("testing/gradcheck.py", "import torch"),
        ("compat/tfpyth.py", "from polybridge.backends.torch import convert"),
        ("tf1.py", "from polybridge import backends"),
        ("backends/mlx/convert.py", "import numpy"),
        ("surprise.py", "import numpy"),
    ],
)
def test_a_forbidden_import_is_reported_with_its_place(tmp_path, place, source):
    result = check(tree(tmp_path, place, source))
    assert result.returncode == 1
    assert f"polybridge/{place}:" in result.stdout


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("core/relay.py", "import threading, numpy as np, ml_dtypes, optree, pluggy"),
        ("core/relay.py", "from . import specs\nfrom .specs import TensorSpec"),
        ("__init__.py", "from polybridge.core.wrapping import wrap"),
        ("backends/torch/convert.py", "import numpy, torch\nfrom torch.utils import dlpack"),
        ("backends/torch/convert.py", "from polybridge.core import specs\nfrom . import source"),
        ("backends/tensorflow/modules.py", "import keras\nimport tensorflow as tf"),
        ("backends/torch/__init__.py", "def load(): from polybridge.backends.torch import backend"),
        ("backends/torch/__init__.py", "from polybridge.core.hookspecs import hookimpl"),
        ("observe/plots.py", "def plot(): import matplotlib.pyplot"),
        ("testing/gradcheck.py", "import polybridge\nfrom polybridge import wrap\ndef run(): import jax"),
        ("compat/tfpyth.py", "import tensorflow, torch\nfrom polybridge import tf1, wrap"),
        ("tf1.py", "import tensorflow as tf\nfrom polybridge import wrap"),
    ],
)
def test_an_allowed_import_passes(tmp_path, place, source):
    result = check(tree(tmp_path, place, source))
    assert result.returncode == 0, result.stdout


def test_a_violation_names_line_import_and_condition(tmp_path):
    result = check(tree(tmp_path, "backends/torch/__init__.py", "import numpy\nimport torch"))
    assert "polybridge/backends/torch/__init__.py:3: may not import torch outside a function" in result.stdout


def test_an_empty_tree_does_not_pass(tmp_path):
    assert check(tmp_path).returncode == 1
