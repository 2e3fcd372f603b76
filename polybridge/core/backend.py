"""The contract that a framework's backend fulfils, each method with its law."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from polybridge.core.errors import NotDifferentiableError
from polybridge.core.specs import TensorSpec, dtype
from polybridge.core.trees import ARRAYS, flatten, unflatten, unused

if TYPE_CHECKING:
    from polybridge.core.evaluator import Evaluator
    from polybridge.core.programs import Results
    from polybridge.core.relay import FunctionRelay, Outcome

Tensor = Any
Run = Callable[..., Sequence[Tensor]]
"""A flat function: tensors in, a sequence of tensors out."""
Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context manager; may be called more than once."""

NOTHING = contextlib.nullcontext()
"""A context that needs not be entered."""


class Narrowing(ABC):
    """What a framework makes narrower than it came, such as float64 where 64 bits are off.

    Attributes:
        latest: another object after each tensor that has become narrower, on whatever thread.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        """Have seen nothing yet."""
        self.latest = object()

    def note(self) -> None:
        """Note that a tensor has become narrower."""
        self.latest = object()

    @abstractmethod
    def dtypes(self) -> frozenset[str]:
        """Return the dtypes whose tensors become narrower on this thread, now."""


class Rows(NamedTuple):
    """A tensor of which all rows are zero but some: the gradient of a table in which rows were looked up.

    Attributes:
        indices: which rows, int64 of shape (n,); a row that is there twice is the sum.
        values: the rows, of shape (n, *shape[1:]).
        shape: of the whole tensor.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]


class Pullback(ABC):
    """The derivative of one evaluation, from the cotangents of its outputs to those of its primals.

    It keeps what it needs alive by itself, may be called any number of times and from any thread.
    """

    @abstractmethod
    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return a cotangent per primal, of its shape and dtype; None where it has no influence.

        A cotangent that is None stands for zero.
        """

    @abstractmethod
    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        """Evaluate the pullback as a function of `(*primals, *cts)` and return its own pullback beside the result."""

    def rows(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | Rows | None]:
        """Return what a call does, with `Rows` for what the framework has as rows."""
        return self(cts)

    def jvp(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return a tangent per output of the evaluation, by one per primal; None is zero, in both.

        Raises:
            NotImplementedError: there is no forward mode of its own; the pullback of the pullback has to serve.
        """
        raise NotImplementedError

    def closed_over(self, fn: Callable[..., Any]) -> list[str]:
        """Name the trainable state that the evaluation of `fn` read besides its primals."""
        return []


class Backend(ABC):
    """What polybridge asks of a framework. The first five methods suffice, in both roles; the others add speed.

    The defaults carry tensors as NumPy arrays and differentiate a pullback by running its function again.
    """

    name: ClassVar[str]
    """The canonical name, as given to `wrap(src=..., dst=...)`."""
    aliases: ClassVar[tuple[str, ...]] = ()
    requirement: ClassVar[str] = ""
    """What pip has to install when the framework is missing."""
    writes: ClassVar[bool] = True
    """Whether programs in this framework may write to a tensor in place."""
    derivatives: ClassVar[bool] = True
    """Whether the framework differentiates its own functions. Where it does not, `wrap(vjp=...)` says how."""
    counts_writes: ClassVar[bool] = False
    """Whether `version` tells of writes in place."""
    dlpack: ClassVar[bool] = False
    """Whether `to_dlpack` and `from_dlpack` are given; without them, on either side, tensors cross as NumPy arrays."""
    takes_rows: ClassVar[bool | None] = None
    """Whether a cotangent may be `Rows`: always (True), where the user asks for it (False), or never (None)."""
    alignment: ClassVar[int] = 1
    """Bytes that the address of imported memory has to be a multiple of."""
    narrowing: ClassVar[Narrowing | None] = None
    """What becomes narrower here; cotangents of it are widened on the way back. None is nothing, ever."""
    around: Callable[[], contextlib.AbstractContextManager[Any] | None] | None = None
    """Returns the context that an evaluation with a derivative, or its pullback, needs here and now, if it needs one.
    None instead of a function says that it never does."""

    # Tensors. Law: from_numpy(to_numpy(x)) equals x bit for bit, in shape, dtype and value.

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a tensor of this framework; depends on its type alone."""

    @abstractmethod
    def to_numpy(self, tensor: Tensor, /) -> np.ndarray[Any, Any]:
        """Return the values, as a view where possible; the array is not written to."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray[Any, Any], /) -> Tensor:
        """Return a tensor of the array's values, shape and dtype that does not share its memory."""

    def parts(self, tree: Any) -> tuple[dict[str, Tensor], Callable[[Mapping[str, Tensor]], Any]]:
        """Return the tensors of a tree of weights by where they are, as `layers.0.kernel`, and how to put others there.

        NumPy arrays count as tensors, and become such. Law: with the tensors themselves, the tree is what it was.
        """
        leaves, treedef = flatten(tree)
        is_part = [self.is_tensor(x) or isinstance(x, ARRAYS) for x in leaves]
        named: dict[str, Tensor] = {}
        for path, leaf, taken in zip(treedef.paths(), leaves, is_part, strict=True):
            if taken:
                name = unused(".".join(map(str, path)) or "params", named)
                named[name] = leaf if self.is_tensor(leaf) else self.from_numpy(np.asarray(leaf))

        def rebuilt(values: Mapping[str, Tensor]) -> Any:
            names = iter(named)
            return unflatten(
                treedef, [values[next(names)] if taken else x for x, taken in zip(leaves, is_part, strict=True)]
            )

        return named, rebuilt

    # Derivatives. Law: <ct, J v> equals <pullback(ct), v>, and vjp inside vjp is itself differentiable.

    @abstractmethod
    def vjp(self, fn: Run, primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
        """Evaluate `fn(*primals)` and return its outputs and its pullback.

        Args:
            fn: takes the primals; returns a sequence of floating or complex tensors.
            primals: floating or complex tensors.

        Returns:
            The outputs, and a `Pullback` or any callable from a list of cotangents to one per primal.
        """

    @abstractmethod
    def wrap_as_native(self, relay: FunctionRelay) -> Callable[..., Outcome]:
        """Return a function of flat native tensors that evaluates `relay` and records its derivative natively.

        The function is called with one native tensor per input of the relay and returns the relay's outcome,
        with leaves that this framework's own differentiation follows.
        """

    def decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that the user calls, marked as this framework needs it."""
        return function

    # The exchange. Law: from_dlpack(to_dlpack(dense(x))) has the values of x and shares its memory.

    def is_composite(self, value: Any) -> bool:
        """Whether `value` is made of tensors of this framework without being one (sparse, ragged, symbolic)."""
        return False

    def advice(self, value: Any) -> str:
        """Return a sentence on what to do with a value of which `is_composite` is true; nothing if that is plain."""
        return ""

    def is_tree(self, value: Any) -> bool:
        """Whether `value` is a container to this framework: `is_composite` may differ among values of its type."""
        return False

    def spec(self, tensor: Tensor) -> TensorSpec:
        """Return shape and dtype."""
        array = self.to_numpy(tensor)
        return TensorSpec(array.shape, array.dtype.name)

    def dtype_name(self, tensor: Tensor) -> str:
        """Return the NumPy name of the dtype."""
        return self.spec(tensor).dtype

    def is_differentiable(self, tensor: Tensor) -> bool:
        """Whether the tensor is floating or complex.

        Raises:
            UnsupportedTensorError: a dtype that no other framework holds.
        """
        return self.spec(tensor).differentiable

    def dense(self, tensor: Tensor, /) -> Tensor:
        """Return a row-major tensor of the same values, the same object where it is one already.

        Raises:
            UnsupportedTensorError: for what has no such form (strings, quantised values).
        """
        return tensor

    def check_detached(self, tensor: Tensor) -> None:
        """Refuse a tensor whose gradient history would be lost, where that can be seen.

        Raises:
            UnsupportedTensorError: the tensor is in the middle of a graph.
        """

    def to_dlpack(self, tensor: Tensor, /) -> Any:
        """Return an unversioned DLPack capsule of a dense tensor."""
        raise NotImplementedError

    def export(self, tensor: Tensor, /) -> Any:
        """Return a capsule of a tensor that is dense as it is, None of one of which `dense` makes another.

        Raises:
            UnsupportedTensorError: as `dense`.
        """
        return self.to_dlpack(tensor) if self.dense(tensor) is tensor else None

    def release(self, tensor: Tensor, /) -> Any:
        """Return the same of a tensor of which `owns` is true, for others to write to; None of any other."""
        return self.export(tensor) if self.owns(tensor) else None

    def from_dlpack(self, capsule: Any, /) -> Tensor:
        """Return a tensor on the memory of a capsule, which is row-major and aligned as `alignment` says."""
        raise NotImplementedError

    def from_rows(self, rows: Rows) -> Tensor:
        """Return this framework's own kind of tensor for rows of its tensors; asked where `takes_rows` is not None."""
        raise NotImplementedError

    def adopt(self, array: np.ndarray[Any, Any], /) -> Tensor | None:
        """Return a tensor on the array's own memory, which nobody else will touch; None where that cannot be."""
        return None

    def copy(self, tensor: Tensor, /) -> Tensor:
        """Return a copy with memory of its own; differentiable where `counts_writes`."""
        return self.from_numpy(np.array(self.to_numpy(tensor)))

    def owns(self, tensor: Tensor, /) -> bool:
        """Whether it is proved that nothing else refers to the tensor's memory."""
        return False

    def reference(self, tensor: Tensor, /) -> Tensor:
        """Return another tensor object on the same memory, without the tensor's history."""
        return tensor

    def version(self, tensor: Tensor, /) -> int:
        """Return a number that every write to the tensor's memory changes; asked where `counts_writes`."""
        raise NotImplementedError

    def is_refused_write(self, error: Exception) -> bool:
        """Whether `error` says that the framework has refused to write to a tensor that it differentiates."""
        return False

    def lasts(self, tensor: Tensor) -> bool:
        """Whether it is a weight, which calls are given again and again; asked where `counts_writes`."""
        return False

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors of one spec have the same bytes; asked where `counts_writes`."""
        return self.to_numpy(a).tobytes() == self.to_numpy(b).tobytes()

    # Batches of the caller, evaluated example by example. Nothing here is differentiated.

    def select(self, tensor: Tensor, axis: int, index: int) -> Tensor:
        """Return the example at `index` along `axis`."""
        return self.from_numpy(self.to_numpy(tensor).take(index, axis))

    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Return tensors of one shape along a new axis."""
        return self.from_numpy(np.stack([self.to_numpy(x) for x in tensors], axis))

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of tensors of one shape."""
        return self.from_numpy(
            np.sum([self.to_numpy(x) for x in tensors], axis=0, dtype=self.to_numpy(tensors[0]).dtype)
        )

    # Running. What a call needs around it.

    def vmap(self, fn: Run, axes: Sequence[int | None]) -> Run:
        """Return `fn` over batches, as the framework itself vectorises functions; called once per function.

        Args:
            fn: takes one example of each input, and returns a sequence of tensors. It has to be called at least once
                for each combination of shapes and dtypes of the inputs.
            axes: the axis of each input along which its examples lie; None for an input that they share.

        Returns:
            A function of batches that returns the results of `fn`, with the examples along axis 0. A `vjp` around it
            is right, and it raises what `fn` raises or, where it cannot vectorise `fn`, any exception of its own.
        """

        def cannot(*_: Tensor) -> Sequence[Tensor]:
            raise NotImplementedError(f"{self.name} has no vectorisation")

        return cannot

    def evaluator(self, run: Callable[..., Results], run_on_copies: Callable[..., Results]) -> Evaluator:
        """Return how a program is evaluated again and again, where the framework keeps what it compiles.

        Args:
            run: the program: takes a list of tensors and returns `Results`.
            run_on_copies: the program for placeholders.
        """
        from polybridge.core.evaluator import Evaluator  # which imports this module

        return Evaluator(self, run, run_on_copies)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()`, which evaluates a function of this framework without a derivative."""
        return fn()

    def started(self) -> bool:
        """Whether the framework has begun to compute, in a way that a forked child cannot continue."""
        return False

    def differentiating(self) -> bool:
        """Whether the calling thread wants derivatives of what this backend runs as a source."""
        return True

    def randomness(self) -> Context | None:
        """Capture the state of the random generators; the result re-enters it for another run of the same function.

        None where this framework has no state that can be captured.
        """
        return None

    def without_randomness(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for another run of a function that has been seen not to draw from these generators.

        Where the framework can tell, the context raises `ResidualError` if the function draws after all.
        """
        return contextlib.nullcontext()

    def modes(self) -> Hashable:
        """Return what the calling thread has set that specs of results depend on, such as autocast or a width."""
        return ()

    def state(self) -> Context:
        """Capture the calling thread's state; the result re-enters it on another thread.

        It returns `NOTHING` where that thread has the state already.
        """
        return lambda: NOTHING

    def placeholders(self, specs: Sequence[TensorSpec]) -> tuple[list[Tensor], Context]:
        """Return tensors of these specs, for runs of which only shapes and dtypes are read, and their context.

        Here they are ones, and the function really runs.
        """
        return [self.from_numpy(np.ones(spec.shape, dtype(spec.dtype))) for spec in specs], contextlib.nullcontext

    def needs_values(self, error: Exception) -> bool:
        """Whether `error` says that a function has asked a placeholder for its values."""
        return False


class NoPullback(Pullback):
    """The pullback of what has no derivative: it says so when it is called.

    Args:
        error: what to raise, each time anew.
    """

    def __init__(self, error: NotDifferentiableError) -> None:
        """Keep the message."""
        self._error = error

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Raise."""
        raise type(self._error)(*self._error.args)

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        """Raise."""
        raise type(self._error)(*self._error.args)


class Replayed(Pullback):
    """A plain callable as a pullback; differentiates it by evaluating the function again.

    Args:
        backend: differentiates what the second evaluation does.
        evaluate: returns outputs and such a callable at some primals, as `Backend.vjp` does.
        primals: of the first evaluation.
        outputs: of the first evaluation, to compare the second with.
        call: the pullback.
    """

    def __init__(
        self,
        backend: Backend,
        evaluate: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Callable[..., Any]]],
        primals: Sequence[Tensor],
        outputs: Sequence[Tensor],
        call: Callable[..., Any],
    ) -> None:
        """Keep what the second evaluation needs."""
        self._backend, self._evaluate, self._primals, self._outputs = backend, evaluate, primals, outputs
        self._call = call

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Pull back, with zeros for absent cotangents."""
        result: Sequence[Tensor | None] = self._call(self._filled(cts))
        return result

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        """Evaluate `(primals, cts) -> cotangents` as a function of its own.

        Raises:
            NotDifferentiableError: the function gave other values than at first, so that this would be the derivative
                of another evaluation.
        """
        count = len(self._primals)
        connected: list[int] = []

        def pulled(*inputs: Tensor) -> Sequence[Tensor]:
            outputs, call = self._evaluate(inputs[:count])
            self._compare(outputs)
            found = call(list(inputs[count:]))
            connected[:] = [i for i, x in enumerate(found) if x is not None]
            return [x for x in found if x is not None]

        inputs = [*self._primals, *self._filled(cts)]
        outputs, pullback = pullback_of(self._backend, pulled, inputs)
        everything = tuple(range(len(inputs)))
        return spread(outputs, connected, count), _View(pullback, tuple(connected), everything, len(inputs))

    def _compare(self, outputs: Sequence[Tensor]) -> None:
        try:
            first, second = ([self._backend.to_numpy(y).tobytes() for y in ys] for ys in (self._outputs, outputs))
        except TypeError:  # of placeholders and tracers, which have no values
            return
        if first != second:
            raise NotDifferentiableError.run_again(self._backend.name)

    def _filled(self, cts: Sequence[Tensor | None]) -> list[Tensor]:
        backend = self._backend
        return [
            backend.from_numpy(np.zeros_like(backend.to_numpy(y))) if ct is None else ct
            for ct, y in zip(cts, self._outputs, strict=True)
        ]


class _View(Pullback):
    """A pullback that takes and returns longer lists than the one inside it.

    Args:
        inner: the pullback inside.
        take: which of the cotangents given are the inner ones.
        place: which of the cotangents returned are the inner ones; the others are None.
        count: how many cotangents are returned.
    """

    def __init__(self, inner: Pullback, take: tuple[int, ...], place: tuple[int, ...], count: int) -> None:
        self._inner, self._take, self._place, self._count = inner, take, place, count

    def __call__(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return spread(self._inner([cts[i] for i in self._take]), self._place, self._count)

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Pullback]:
        outputs, pullback = self._inner.vjp([cts[i] for i in self._take])
        place = (*self._place, *(self._count + i for i in self._take))
        view = _View(pullback, self._place, place, self._count + len(cts))
        return spread(outputs, self._place, self._count), view


def pullback_of(backend: Backend, fn: Run, primals: Sequence[Tensor]) -> tuple[Sequence[Tensor], Pullback]:
    """Return `backend.vjp(fn, primals)` with a `Pullback`, whatever callable the backend gave."""
    outputs, call = backend.vjp(fn, primals)
    if isinstance(call, Pullback):
        return outputs, call
    if not callable(call):
        raise NotDifferentiableError(f"The backend {backend.name!r} returned {call!r} as a pullback, not a callable.")
    return outputs, Replayed(backend, lambda primals: backend.vjp(fn, primals), primals, outputs, call)


def spread(values: Sequence[Tensor | None], positions: Sequence[int], count: int) -> list[Tensor | None]:
    """Return a list of `count` with `values` at `positions` and None elsewhere."""
    spread: list[Tensor | None] = [None] * count
    for position, value in zip(positions, values, strict=True):
        spread[position] = value
    return spread
