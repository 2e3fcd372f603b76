"""TfPyTh's three functions under their old names: `from polybridge.compat import tfpyth`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polybridge.core.wrapping import wrap
from polybridge.tf1 import graph_function


class _TorchFunction:
    """What `torch_from_tensorflow` returns; TfPyTh's users call its `apply`."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply


def torch_from_tensorflow(tf_session: Any, tf_inputs: Sequence[Any], tf_output: Any, tf_dtype: Any = None) -> Any:
    """Return an object whose `apply` is a torch function that evaluates `tf_output` in the session.

    Args:
        tf_session: a `tf.compat.v1.Session`.
        tf_inputs: the placeholders that the arguments of `apply` are fed to.
        tf_output: a tensor of the session's graph.
        tf_dtype: TfPyTh needed the output's dtype here; it is known, and checked if given.

    Raises:
        ValueError: `tf_dtype` is not the output's dtype.
    """
    if tf_dtype is not None and tf_dtype != tf_output.dtype:
        raise ValueError(f"`torch_from_tensorflow` got tf_dtype={tf_dtype!r}, but the output is {tf_output.dtype!r}.")
    return _TorchFunction(wrap(graph_function(tf_session, list(tf_inputs), tf_output), src="tf", dst="torch"))


def eager_tensorflow_from_torch(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of eager TensorFlow tensors that evaluates the torch function `func`."""
    return wrap(func, src="torch", dst="tf")


def tensorflow_from_torch(func: Callable[..., Any], inp: Sequence[Any], Tout: Any, name: str | None = None) -> Any:
    """Return a tensor of the TensorFlow graph being built that evaluates the torch function `func`.

    Args:
        func: takes as many torch tensors as `inp` has entries.
        inp: TensorFlow tensors.
        Tout: the dtype of the result, or a list with one per result.
        name: of the result in the graph.
    """
    import tensorflow as tf

    wrapped = wrap(func, src="torch", dst="tf")
    result = wrapped(*inp)
    promised = list(Tout) if isinstance(Tout, (list, tuple)) else [Tout]
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    found = [y.dtype for y in results]
    if found != promised:
        raise TypeError(f"`tensorflow_from_torch` got Tout={Tout!r}, but the function returns {found!r}.")
    named = [tf.identity(y, name=name) for y in results]
    return named if isinstance(Tout, (list, tuple)) else named[0]
