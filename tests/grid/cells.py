"""The grid of pairs, modes and orders that polybridge promises: run by test_grid.py, printed by support_table.py."""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = ("value", "first", "second")


@dataclass(frozen=True)
class Mode:
    """One way in which a function of one framework is called from another.

    Args:
        src: the framework of the function.
        dst: the framework of the caller.
        name: how the docs call it.
        runner: the function of runners.py that computes the value and both derivatives this way.
    """

    src: str
    dst: str
    name: str
    runner: str


MODES = (
    Mode("tensorflow", "torch", "eager function", "torch_from_eager"),
    Mode("tensorflow", "torch", "`tf.function`", "torch_from_function"),
    Mode("tensorflow", "torch", "TF1 session graph", "torch_from_session"),
    Mode("torch", "tensorflow", "eager", "tensorflow_eager"),
    Mode("torch", "tensorflow", "`tf.function`", "tensorflow_function"),
    Mode("torch", "tensorflow", "TF1 graph", "tensorflow_session"),
    Mode("tensorflow", "numpy", "arrays", "numpy_from_tensorflow"),
    Mode("torch", "numpy", "arrays", "numpy_from_torch"),
)
