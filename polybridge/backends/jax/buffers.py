"""The memory that XLA lends a callback, and NumPy arrays, as the tensors of a caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from polybridge.core.backend import Backend
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.specs import TensorSpec

Buffer = Any


class BufferBackend(Backend):
    """Under compiled code it takes the place of the JAX backend as the caller's; see `Exchange.fleeting`.

    A buffer is gone when the call returns, and a function may keep what it is lent: it is always lent a copy.
    """

    name = "jax"
    writes = False

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a buffer or an array."""
        return isinstance(value, (np.ndarray, jax.Array)) or hasattr(value, "__dlpack__")

    to_numpy = staticmethod(np.asarray)  # a view

    def from_numpy(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a copy."""
        return np.array(array)

    def spec(self, tensor: Buffer) -> TensorSpec:
        """Return shape and dtype."""
        array = np.asarray(tensor)
        return TensorSpec(array.shape, array.dtype.name)

    def vjp(self, fn: Callable[..., Any], primals: Sequence[Buffer]) -> NoReturn:
        """Refuse: no function is written on buffers."""
        raise NotImplementedError

    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return the relay."""
        return lambda *xs: relay(xs)


BUFFERS = BufferBackend()
