"""TensorFlow 1 graphs as functions: `wrap(tf1.graph_function(session, inputs, outputs), src="tf", dst=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polybridge.core.registry import get_backend


def graph_function(session: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return the computation of a session's graph as an eager TensorFlow function, differentiable to any order.

    The gradient of first order is added to the graph now, that of each higher order when it is first asked for. The
    backward is fed with what the forward computed: nothing runs twice, and a dropout mask is drawn once.

    Args:
        session: a `tf.compat.v1.Session`; stays open as long as the function is used.
        inputs: a list or tuple with one tree of placeholders (or other feedable tensors) per argument of the
            function, or one tree, for a function of one argument.
        outputs: a tree of tensors of the graph; the function returns the same tree of values.

    Returns:
        A function of TensorFlow tensors (not of placeholders), to be given to `polybridge.wrap(..., src="tf")`.

    Raises:
        ArgumentError: a leaf is no tensor of the session's graph, or the graph is finalized.
        NotDifferentiableError: when differentiated, if a random operation sits where its value cannot be kept, such
            as inside a `tf.while_loop`.
    """
    return get_backend("tensorflow").graph_function(session, inputs, outputs)  # type: ignore[attr-defined]
