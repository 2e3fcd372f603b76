"""`tf.Module`s and loaded SavedModels as pure functions of their variables."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polybridge.backends.tensorflow import _private, convert, source
from polybridge.core import dlpack
from polybridge.core.backend import Backend
from polybridge.core.errors import MutationError, UnbuiltError, UnsupportedTensorError, WeightsError
from polybridge.core.functional import Functional, Slot, Weights

Tensor = Any


_PATIENCE = 300  # seconds that a call waits for another that it cannot be independent of


class TensorFlowFunctional(Functional):
    """A module that reads variables, as a function of their values.

    TensorFlow has no way to call a module with other values. So the variables are assigned these for the time of the
    call, which moves no bytes, and tapes are told that they come from them. A call that finds variables in use by
    another thread uses a copy of the module.

    Args:
        module: what is called.
        backend: of its tensors.
        endpoint: the name of the function of a SavedModel that is called instead.
    """

    random = False  # no seed reaches it: it draws from TensorFlow's own generators, or from variables

    def __init__(self, module: Any, backend: Backend, endpoint: str | None = None) -> None:
        """Name the variables that there are."""
        self.backend, self.module, self.name = backend, module, type(module).__name__
        self._endpoint = endpoint
        self._takes_training = _takes(module if endpoint is None else getattr(module, endpoint), "training")
        self._spares: list[TensorFlowFunctional] = []  # those that nobody uses
        self._copies: list[TensorFlowFunctional] = []
        self._settled: set[bool] = set()  # whether a call has shown, in training and not, that it makes no variables
        self._drawn: dict[bool, bool] = {}  # by training
        self._index()
        self.built = bool(self.slots)

    def held(self) -> Iterator[Any]:
        """Yield the variables, of copies too."""
        return (slot.holder for functional in (self, *self._copies) for slot in functional.slots)

    def draws(self, training: bool) -> bool:
        """Return whether a call has drawn from TensorFlow's own generators."""
        return self._drawn.get(training, False)

    def draws_unseen(self, training: bool) -> bool:
        """Return the same."""
        return self.draws(training)

    def read(self, slot: Slot) -> Tensor:
        """Return the value of a variable."""
        return tf.raw_ops.ReadVariableOp(resource=slot.holder.handle, dtype=slot.holder.dtype)

    def write(self, values: Mapping[str, Tensor]) -> Any:
        """Assign to the variables.

        Raises:
            WeightsError: the module has other variables or parts than it had.
        """
        self._look()
        for slot in self.slots:
            if slot.name in values:
                value = values[slot.name]
                slot.holder.assign(tf.cast(value, slot.holder.dtype) if value.dtype.is_integer else value)
        return self.module

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call the module once, and set all variables to what they were, or were made with."""
        if self._takes_training:
            kwargs = {"training": False, **kwargs}
        made: list[tuple[tf.Variable, Tensor]] = []

        def recorded(next_creator: Any, **options: Any) -> tf.Variable:
            variable = next_creator(**options)
            if tf.executing_eagerly():
                made.append((variable, variable.read_value()))
            return variable

        with _lent(self.slots, _PATIENCE):
            before = {slot.name: self.read(slot) for slot in self.slots}
            try:
                with tf.variable_creator_scope(recorded):
                    self._function()(*args, **kwargs)
            finally:
                self._assign(before)
            for variable, value in made:
                variable.assign(value)
            self._index()
            self._settled, self.built = {False, True}, True

    def run(self, *args: Any, _weights: Weights, _training: bool, **kwargs: Any) -> tuple[Any, ...]:
        """Call the module while its variables have other values.

        Raises:
            NotImplementedError: it is to be vectorised, and would lose the gradients of what is assigned.
            UnbuiltError: the module was about to make variables.
            UnsupportedTensorError: a weight has another dtype than its variable.
            MutationError: the module assigned to a trainable variable.
            WeightsError: the module has other variables or parts than it had.
        """
        if not self.built:
            raise UnbuiltError.before_call(self.name)
        if source.is_vectorising():
            raise NotImplementedError("TensorFlow vectorises nothing that is assigned to a variable")
        self._look()
        values = {**_weights.params, **{name: tf.stop_gradient(x) for name, x in _weights.state.items()}}
        for slot in self.slots:
            if values[slot.name].dtype.is_integer and slot.holder.dtype.is_integer:
                values[slot.name] = tf.cast(
                    values[slot.name], slot.holder.dtype
                )  # a destination may have its own width
            if values[slot.name].dtype != slot.holder.dtype:
                found, own = values[slot.name].dtype.name, slot.holder.dtype.name
                reason = "a variable of TensorFlow has one dtype for good"
                raise UnsupportedTensorError.weight(self.name, slot.name, found, own, reason)
        with self._borrowed() as functional:
            return functional._run(values, _training, args, kwargs)

    def _run(
        self, values: Mapping[str, Tensor], training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        if self._takes_training:
            kwargs.setdefault("training", training)
        is_first = training not in self._settled and tf.executing_eagerly()
        before = {slot.name: self.read(slot) for slot in self.slots}
        outer = {slot.name: _in_use[id(slot.holder)].value for slot in self.slots}
        try:
            self._tell(values)
            self._assign(values)
            making = tf.variable_creator_scope(self._refused) if is_first else contextlib.nullcontext()
            with making, _private.keeping():
                out = self._called(training, args, kwargs)
            if is_first:
                self._check(values)
                self._settled.add(training)
            return out, {slot.name: self.read(slot) for slot in self.slots if slot.is_state}
        finally:
            try:
                self._assign(before)
                self._tell({name: value for name, value in outer.items() if value is not None})
            except BaseException:  # an interrupt in the midst of it
                self._assign(before)
                self._tell({name: value for name, value in outer.items() if value is not None})
                raise

    def _called(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if training in self._drawn:
            return self._function()(*args, **kwargs)
        with _private.drawing() as drawn:
            out = self._function()(*args, **kwargs)
        self._drawn[training] = drawn()
        return out

    def _look(self) -> None:
        """Raise a WeightsError if something else has been put in the place of a variable or a part with variables."""
        if any(attributes.get(name) is not child for attributes, name, child in self._parts):
            raise WeightsError.rebuilt(self.name)

    def _index(self) -> None:
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        found = _variables(self.module, self._parts) if self._endpoint is None else _captured(self._function())
        self.slots = [
            Slot(name, variable, not trains, trains)
            for name, (variable, trainable) in found.items()
            for trains in [trainable and (variable.dtype.is_floating or variable.dtype.is_complex)]
        ]

    def _function(self) -> Any:
        return self.module if self._endpoint is None else getattr(self.module, self._endpoint)

    def _tell(self, values: Mapping[str, Tensor]) -> None:
        """Tell tapes that the variables come from these values."""
        for slot in self.slots:
            if slot.name in values:
                _in_use[id(slot.holder)].value = values[slot.name]
                _private.record([slot.holder.handle], [values[slot.name]], lambda ct: [ct])

    def _assign(self, values: Mapping[str, Tensor]) -> None:
        for slot in self.slots:
            if slot.name in values:
                tf.raw_ops.AssignVariableOp(resource=slot.holder.handle, value=values[slot.name])

    def _refused(self, next_creator: Any, **options: Any) -> tf.Variable:
        raise UnbuiltError.before_call(self.name)

    def _check(self, values: Mapping[str, Tensor]) -> None:
        """Refuse a module that assigns to weights: what it has assigned would be lost."""
        for slot in self.slots:
            given, found = values[slot.name], self.read(slot)
            if slot.is_state or _address(given) == _address(found):
                continue
            if given.numpy().tobytes() != found.numpy().tobytes():
                raise MutationError.weight(self.name, slot.name)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[TensorFlowFunctional]:
        """Give this function, or while another thread computes with its variables one of a copy.

        Only if there is no copy, wait: what cannot be copied is a SavedModel as a rule, a graph that waits for nobody.
        """
        with contextlib.ExitStack() as stack:
            call = object()
            stack.callback(_return, self.slots, call)
            if _take(self.slots, call):
                yield self
                return
            spare = self._spare()
            if spare is not None:
                stack.callback(self._spares.append, spare)
                stack.enter_context(_lent(spare.slots, _PATIENCE))
                yield spare
                return
            stack.enter_context(_lent(self.slots, _PATIENCE))
            yield self

    def _spare(self) -> TensorFlowFunctional | None:
        with contextlib.suppress(IndexError):
            return self._spares.pop()
        try:
            spare = TensorFlowFunctional(copy.deepcopy(self.module), self.backend, self._endpoint)
        except Exception:  # whatever a class raises that cannot be copied
            return None
        if [slot.name for slot in spare.slots] != [slot.name for slot in self.slots]:
            return None
        spare._settled, spare._drawn = self._settled, self._drawn
        self._copies.append(spare)
        return spare


class _Use:
    """A variable that has other values for the time of a call.

    Attributes:
        thread: that calls.
        calls: some object for each of them, one inside of the other.
        value: of the innermost.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.calls: list[object] = []
        self.value: Tensor | None = None


_in_use: dict[int, _Use] = {}  # by the id of a variable


_returned = threading.Condition()


def _take(slots: Sequence[Slot], call: object) -> bool:
    """Take variables for a call on this thread, if no other has one of them; `_return` undoes it, whole or in part."""
    me = threading.get_ident()
    with _returned:
        ids = {id(slot.holder) for slot in slots}
        if any(_in_use[i].thread != me for i in ids if i in _in_use):
            return False
        for i in ids:
            _in_use.setdefault(i, _Use(me)).calls.append(call)
        return True


def _return(slots: Sequence[Slot], call: object) -> None:
    try:
        _release(slots, call)
    except BaseException:  # an interrupt in the midst of it
        _release(slots, call)
        raise


def _release(slots: Sequence[Slot], call: object) -> None:
    me = threading.get_ident()
    with _returned:
        for i in {id(slot.holder) for slot in slots}:
            use = _in_use.get(i)
            if use is not None and use.thread == me:
                if call in use.calls:
                    use.calls.remove(call)
                if not use.calls:
                    del _in_use[i]
        _returned.notify_all()


@contextlib.contextmanager
def _lent(slots: Sequence[Slot], patience: float) -> Iterator[None]:
    """Take variables, and return them.

    Raises:
        RuntimeError: another thread has had one of them for that many seconds.
    """
    call = object()
    try:
        with _returned:
            if not _returned.wait_for(lambda: _take(slots, call), patience):
                raise RuntimeError(f"{slots[0].name!r} and others have been in use by another thread for {patience} s.")
        yield
    finally:
        _return(slots, call)


def _variables(
    module: Any, parts: list[tuple[dict[str, Any], str, Any]] | None = None
) -> dict[str, tuple[tf.Variable, bool]]:
    """Return the variables that a module tracks, each once, by where they are, and whether they are trained.

    Args:
        module: that is walked.
        parts: gets what was found in an attribute: all attributes of its owner, which one, and what it holds.
    """
    found: dict[str, tuple[tf.Variable, bool]] = {}
    seen: set[int] = set()
    pending = [("", module)]
    view = tf.train.TrackableView(module)
    while pending:
        path, owner = pending.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, tf.Variable):
            found[path] = owner, owner.trainable
            continue
        if type(owner).__module__.startswith("keras.") and isinstance(getattr(owner, "value", None), tf.Variable):
            found[".".join([*path.split(".")[:-1], owner.name])] = owner.value, owner.trainable  # a variable of Keras
            continue
        attributes = getattr(owner, "__dict__", {})
        for name, child in view.children(owner).items():
            pending.append((f"{path}.{name}".lstrip("."), child))
            holds = isinstance(child, tf.Variable) or (isinstance(child, tf.Module) and child.variables)
            if parts is not None and holds and attributes.get(name) is child:
                parts.append((attributes, name, child))
    return found


def _captured(function: Any) -> dict[str, tuple[tf.Variable, bool]]:
    """Return the variables that a function of a SavedModel reads, by their names, as `_variables` does."""
    variables = {id(v): v for concrete in function.concrete_functions for v in concrete.graph.variables}
    found: dict[str, tuple[tf.Variable, bool]] = {}
    for variable in variables.values():
        name = stem = variable.name.partition(":")[0].replace(".", "_").replace("/", ".")
        number = 0
        while name in found:
            number += 1
            name = f"{stem}_{number}"
        found[name] = variable, variable.trainable
    return found


def _address(tensor: Tensor) -> int:
    return dlpack.address(convert.to_dlpack(tensor)) if tensor.shape.num_elements() else 0


def _takes(module: Any, name: str) -> bool:
    """Whether a module's call has an argument of that name."""
    call = module if hasattr(module, "python_function") else module.__call__
    try:
        return name in inspect.signature(getattr(call, "python_function", call)).parameters
    except ValueError:
        return False
