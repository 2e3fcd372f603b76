"""A function and the trees of weights that it takes, as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polybridge.core.backend import Backend
from polybridge.core.errors import OutputError, WeightsError
from polybridge.core.functional import Functional, Slot, Weights, signature_of

Tensor = Any


class Applied(Functional):
    """A function and the trees of weights and state that it takes first, as JAX's modules are written.

    `fn(params, *args)` returns the result, or with a state `fn(params, state, *args)` returns it and the new state. It
    gets `training=` and `rng=` (two uint32 numbers, which are a JAX key) if it has arguments of these names.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Backend,
        params: Any,
        state: Any = None,
        names: Callable[[str], str] = str,
    ) -> None:
        """Name the tensors of the trees by their paths.

        Args:
            fn: the function.
            backend: of its tensors.
            params: the first tree.
            state: the second, if it takes one.
            names: a better name for a path in the state.

        Raises:
            UnsupportedTensorError: a weight is no tensor of the backend.
        """
        self.backend, self.module, self.name = backend, fn, getattr(fn, "__name__", type(fn).__name__)
        self._stateful = state is not None
        self._params, self._with_params = backend.parts(params)
        self._state, self._with_state = backend.parts(state)
        self._names = {path: names(path) for path in self._state}
        self._names = {path: f"state.{name}" if name in self._params else name for path, name in self._names.items()}
        self.slots = [
            # Integers, such as a table, are nothing that an optimiser of any framework takes.
            *(Slot(name, None, not (d := backend.is_differentiable(x)), d) for name, x in self._params.items()),
            *(Slot(self._names[name], None, True, False) for name in self._state),
        ]
        taken = _parameters(fn)
        self.random, self._takes_training = "rng" in taken, "training" in taken

    def parts(self) -> tuple[Any, ...]:
        """Return the function and its trees."""
        state = self._with_state(self._state) if self._stateful else None
        return self.module, self._with_params(self._params), state

    def read(self, slot: Slot) -> Tensor:
        """Return a tensor."""
        found = self._params.get(slot.name)
        return self._named_state(self._state)[slot.name] if found is None else found

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Return the trees with other tensors: `params`, or `(params, state)`."""
        self._params = {name: values.get(name, x) for name, x in self._params.items()}
        self._state = {name: values.get(self._names[name], x) for name, x in self._state.items()}
        params = self._with_params(self._params)
        return (params, self._with_state(self._state)) if self._stateful else params

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Call the function."""
        if self._takes_training:
            kwargs.setdefault("training", _training)
        if self.random and _weights.seed is not None:
            kwargs.setdefault("rng", _weights.seed)
        values = {**_weights.params, **_weights.state}
        params = self._with_params({name: values[name] for name in self._params})
        if not self._stateful:
            return self.module(params, *args, **kwargs), {}
        state = self._with_state({name: values[self._names[name]] for name in self._state})
        returned = self.module(params, state, *args, **kwargs)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise OutputError.without_state(self.name, returned)
        out, state = returned
        after, _ = self.backend.parts(state)
        if after.keys() != self._state.keys():
            missing, unknown = self._state.keys() - after.keys(), after.keys() - self._state.keys()
            raise WeightsError.unlike(f"{self.name}'s new state", sorted(missing), sorted(unknown))
        return out, self._named_state(after)

    def signature(self) -> inspect.Signature | None:
        """Return that of the function without what a call adds."""
        found = signature_of(self.module)
        if found is None:
            return None
        own = 2 if self._stateful else 1
        kept = [p for i, p in enumerate(found.parameters.values()) if i >= own and p.name not in ("rng", "training")]
        return found.replace(parameters=kept)

    def _named_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names[name]: x for name, x in state.items()}


def _parameters(fn: Callable[..., Any]) -> Iterable[str]:
    found = signature_of(fn)
    return () if found is None else found.parameters
