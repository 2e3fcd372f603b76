"""JAX as a backend, delegating to its siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polybridge.backends.jax import convert, native, source, trees
from polybridge.core.backend import Backend
from polybridge.core.evaluator import Evaluator
from polybridge.core.programs import Results

Tensor = Any


class JaxBackend(Backend):
    """JAX never writes in place, compiles pure functions, and has 64 bits only where they are switched on."""

    name = "jax"
    writes = False
    dlpack = True

    is_tensor = staticmethod(convert.is_tensor)
    is_composite = staticmethod(convert.is_composite)
    is_tree = staticmethod(convert.is_tree)
    to_numpy = staticmethod(convert.to_numpy)
    from_numpy = staticmethod(convert.from_numpy)
    parts = staticmethod(trees.parts)
    vjp = staticmethod(source.vjp)
    wrap_as_native = staticmethod(native.wrap_as_native)
    spec = staticmethod(convert.spec)
    dtype_name = staticmethod(convert.dtype_name)
    is_differentiable = staticmethod(convert.is_differentiable)
    dense = staticmethod(convert.dense)
    export = staticmethod(convert.export)
    release = staticmethod(convert.release)
    to_dlpack = staticmethod(convert.to_dlpack)
    from_dlpack = staticmethod(convert.from_dlpack)
    copy = staticmethod(convert.copy)
    owns = staticmethod(convert.owns)
    narrowing = convert.narrowing
    vmap = staticmethod(source.vmap)
    modes = staticmethod(convert.narrows)
    needs_values = staticmethod(source.needs_values)
    started = staticmethod(convert.started)
    state = staticmethod(source.state)

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Return an evaluator that compiles."""
        return source.CompilingEvaluator(self, run, run_on_copies)
