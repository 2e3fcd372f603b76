"""How torch evaluates and differentiates its own functions, and what it can tell of them without values."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._C import _is_fwd_grad_enabled  # private, as the hooks
from torch._C._autograd import (  # type: ignore[attr-defined] # private: nothing public takes hooks off (torch 2.13)
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_functorch_wrapped_tensor  # private, as in native.py
from torch._subclasses.fake_tensor import (  # private: torch has no public one (2.13)
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # private, as above
from torch.autograd.graph import (
    GradientEdge,
    Node,
    get_gradient_edge,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # private, as FakeTensorMode
from torch.utils._pytree import tree_map_only  # private: what torch's own modes use

from polybridge.backends.torch.convert import empty
from polybridge.core.abstract import Abstract
from polybridge.core.backend import NOTHING, Context, Pullback, Rows, spread
from polybridge.core.closures import draws_alike, reachable
from polybridge.core.errors import ResidualError
from polybridge.core.evaluator import Evaluator, Run
from polybridge.core.programs import Results
from polybridge.core.specs import TensorSpec

Tensor = torch.Tensor

_run_backward = torch.autograd.Variable._execution_engine.run_backward  # private: what `torch.autograd.grad` calls


def run(fn: Callable[[], Any]) -> Any:
    """Call `fn()` with tensors that count writes."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return fn()
    if _is_alone():
        return fn()
    with _apart():
        return fn()


def around() -> contextlib.AbstractContextManager[Any] | None:
    """Return a context in which autograd takes tensors, where the caller, who differentiates, is in inference mode."""
    return _training() if torch.is_inference_mode_enabled() else None


@contextlib.contextmanager
def _training() -> Any:
    with torch.inference_mode(False), torch.no_grad():
        yield


def vjp(fn: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor]) -> tuple[list[Tensor], Pullback]:
    """Evaluate `fn` with autograd on and return its outputs without history, beside the pullback."""
    with _recording():
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in primals]
        nested = any(x.requires_grad for x in primals)
        outputs = list(fn(*inputs))
        edges = _edges(outputs)
    pullback = GraphPullback(inputs, edges, nested)
    return [y if nested else y.detach() for y in outputs], pullback


class RecordingEvaluator(Evaluator):
    """Records a program as `vjp` does a function; what it is lent has no history, so that it is never nested."""

    def abstract(self, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> Abstract:
        """Return the plan of an evaluation, which tells whether the program has drawn random numbers."""
        around, _traced.draws = _traced.draws, False
        try:
            plan = super().abstract(specs, wanted)
            plan.draws = _traced.draws
            return plan
        finally:
            _traced.draws = _traced.draws or around

    def _vjp(self, inputs: Sequence[Tensor], wanted: Sequence[int], run: Run) -> tuple[Results, Pullback]:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and _is_alone():
            return _recorded(inputs, wanted, run)
        with _recording():
            return _recorded(inputs, wanted, run)


def _recorded(inputs: Sequence[Tensor], wanted: Sequence[int], run: Run) -> tuple[Results, Pullback]:
    recorded = list(inputs)
    for i in wanted:
        recorded[i] = inputs[i].detach().requires_grad_()
    results = run(recorded)
    tensors: list[Any] = results.tensors
    edges = []
    for i, is_output in enumerate(results.differentiable):
        if is_output:
            edges.append(_edge(tensors[i]))
            tensors[i] = tensors[i].detach()
    return results, GraphPullback(list(map(recorded.__getitem__, wanted)), edges)


def vmap(fn: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Callable[..., Sequence[Tensor]]:
    """Return `fn` over batches; random numbers differ from example to example, as in a loop, but those of one seed."""
    mapped: Callable[..., Sequence[Tensor]] = torch.vmap(
        lambda *xs: tuple(fn(*xs)), in_dims=tuple(axes), randomness="same" if draws_alike(fn) else "different"
    )
    return mapped


def is_refused_write(error: Exception) -> bool:
    """Whether autograd refused to write to a leaf, or to a view of one, that it differentiates."""
    refusal = "leaf Variable that requires grad is being used in an in-place"
    return isinstance(error, RuntimeError) and refusal in str(error)


class GraphPullback(Pullback):
    """The pullback that torch's own graph holds: it keeps the graph by its edges, not its outputs' memory."""

    def __init__(
        self, inputs: Sequence[Tensor | None], edges: Sequence[GradientEdge | None], nested: bool = False
    ) -> None:
        """Keep the graph.

        Args:
            inputs: what autograd differentiates with respect to; None for a cotangent that was zero.
            edges: where each output enters the graph; None for an output that no input influences.
            nested: whether the inputs belong to a graph around this one.
        """
        self._inputs, self._edges, self._nested = inputs, edges, nested

    def __call__(self, cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run autograd backward once."""
        followed = False
        if torch.is_grad_enabled():
            followed = self._nested
            for ct in cts:
                followed = followed or (ct is not None and ct.requires_grad)
        return list(map(_dense, self._gradients(cts, create_graph=followed)))

    def rows(self, cts: Sequence[Tensor | None]) -> list[Tensor | Rows | None]:
        """Run autograd backward once; `torch.nn.Embedding(sparse=True)` has rows."""
        return list(map(_rows, self._gradients(cts, create_graph=False)))

    def vjp(self, cts: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Pullback]:
        """Run autograd backward in a way that extends the graph."""
        with _recording():
            leaves = [None if ct is None else ct.detach().requires_grad_() for ct in cts]
            found = list(map(_dense, self._gradients(leaves, create_graph=True)))
            edges = _edges(found)
        return [None if x is None else x.detach() for x in found], GraphPullback([*self._inputs, *leaves], edges)

    def closed_over(self, fn: Callable[..., Any]) -> list[str]:
        """Name the leaves of the graph that are not inputs."""
        own = {id(x) for x in self._inputs}
        found = [x for x in _leaves(self._edges) if id(x) not in own]
        names = _names(fn) if found else {}
        return [names.get(id(x), f"a tensor of shape {tuple(x.shape)}") for x in found]

    def _gradients(self, cts: Sequence[Tensor | None], create_graph: bool) -> list[Tensor | None]:
        edges, grads, places = [], [], []
        for edge, ct in zip(self._edges, cts, strict=True):
            if edge is not None and ct is not None:
                edges.append(edge)
                grads.append(ct)
        for i, x in enumerate(self._inputs):
            if x is not None:
                places.append(i)
        if not edges or not places:
            return [None] * len(self._inputs)
        inputs = tuple(map(self._inputs.__getitem__, places))
        # `torch.autograd.grad` without its checks of user input, which take as long as a small function's backward.
        found = _run_backward(
            tuple(edges), tuple(grads), True, create_graph, inputs, allow_unreachable=True, accumulate_grad=False
        )
        return list(found) if len(places) == len(self._inputs) else spread(found, places, len(self._inputs))


def placeholders(specs: Sequence[TensorSpec]) -> tuple[list[Tensor], Context]:
    """Return fake tensors, which have shapes and dtypes and run every operation without computing."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    entering = threading.RLock()  # a mode keeps count of its entries on itself, and two threads may trace one plan

    @contextlib.contextmanager
    def running() -> Iterator[None]:
        grad = torch.is_grad_enabled()  # which leaving inference mode switches on
        with (
            entering,
            torch.inference_mode(False),
            torch.set_grad_enabled(grad),
            _without_look_for_nan(),
            mode,
            _Untouched(fakes),
            _StandIns(fakes),
        ):
            yield

    with torch.inference_mode(False), mode:
        return [empty(cast(tuple[int, ...], spec.shape), spec.dtype) for spec in specs], running


def needs_values(error: Exception) -> bool:
    """Whether a function has asked for what a fake tensor does not have; torch has no one class for it (2.13)."""
    return isinstance(error, _VALUELESS) or _OF_FAKES.search(str(error)) is not None


_VALUELESS = (DataDependentOutputException, DynamicOutputShapeException)
_OF_FAKES = re.compile("fake ?tensor|fake impl|not supported for tensor subclasses|'meta' device", re.IGNORECASE)


def _without_look_for_nan() -> contextlib.AbstractContextManager[Any]:
    """Let `torch.autograd.detect_anomaly` look for no NaN: a fake tensor has no values to look at."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return torch.autograd.set_detect_anomaly(True, check_nan=False)
    return NOTHING


class _Fakes:
    """The fakes of one trace: one for each real tensor, and for a view of it a view of that."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._alive: dict[int, Tensor] = {}  # by identity; torch's own memory of them is weak

    def __call__(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
            return tensor
        fake = self.mode.from_tensor(tensor)
        self._alive[id(fake)] = fake
        return fake


class _Untouched(TorchDispatchMode):
    """Lets writes to real tensors, such as a module's statistics, happen to fakes of them: nothing is to change."""

    def __init__(self, fakes: _Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _may_draw(func):
            note_draw()
        with torch._C.DisableTorchFunction():  # `_StandIns` is for the user's code, not for torch's conversions
            if func._schema.is_mutable:
                args, kwargs = tree_map_only(Tensor, self._fakes, (args, kwargs))
            return func(*args, **kwargs)


class _StandIns(TorchFunctionMode):
    """Puts fakes in the place of real tensors that the function reaches, before autograd records what it does to them.

    A real tensor that is written to stays as it was, history included; its fake shows the write to the rest of the run.
    """

    def __init__(self, fakes: _Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS or fake_mode() is not self._fakes.mode:  # another trace's code, or code on real tensors
            return func(*args, **kwargs)
        reals: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            found = self._fakes(tensor)
            reals[id(found)] = tensor
            return found

        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        result = func(*args, **kwargs)
        return reals.get(id(result), result)  # `module.count += 1` assigns the real tensor again


# What reads values has them of a real tensor only.
_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})


def fake_mode() -> FakeTensorMode | None:
    """Return the mode under which this thread runs on fake tensors; private: torch has no public way (2.13)."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def state() -> Context:
    """Capture what torch keeps per thread: grad mode, autocast and the default device."""
    grad, dtypes, device = torch.is_grad_enabled(), autocast(), torch.get_default_device()
    is_plain = device.type == "cpu" and not any(dtypes)

    def entered() -> contextlib.AbstractContextManager[Any]:
        if is_plain and not torch._C._is_any_autocast_enabled():  # private: the public one asks for one kind of device
            return NOTHING if torch.is_grad_enabled() == grad else torch.set_grad_enabled(grad)
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(device)
        stack.enter_context(autocasting(dtypes))
        return stack

    return entered


@contextlib.contextmanager
def autocasting(dtypes: Sequence[torch.dtype | None]) -> Iterator[None]:
    """Let autocast be as `autocast` has found it."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in zip(AUTOCAST, dtypes, strict=True):
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


AUTOCAST = ("cpu", "cuda")


class _Traced(threading.local):
    """What has been seen of the function that this thread runs on placeholders."""

    draws = False


_traced = _Traced()


def note_draw() -> None:
    """Note that the function that this thread runs on placeholders may draw random numbers."""
    _traced.draws = True


def _may_draw(operation: Any) -> bool:
    """Whether an operation draws from a generator, or is somebody's own, so that nobody knows."""
    return torch.Tag.nondeterministic_seeded in operation.tags or operation.namespace not in _NAMESPACES


_NAMESPACES = ("aten", "prim", "prims")


class _Undrawn(TorchDispatchMode):
    """Refuses operations that may draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _may_draw(func):
            raise ResidualError.differs()
        return func(*args, **(kwargs or {}))


def without_randomness() -> contextlib.AbstractContextManager[Any]:
    """Return a context that refuses to draw random numbers."""
    undrawn: contextlib.AbstractContextManager[Any] = _Undrawn()  # type: ignore[no-untyped-call]
    return undrawn


def randomness() -> _Randomness:
    """Capture the state of the default generators; what is captured is shared while nobody draws a number."""
    global _latest
    on_cpu = torch.default_generator.get_state().numpy().tobytes()
    if _HAS_CUDA and torch.cuda.is_initialized():
        return _Randomness(on_cpu, torch.cuda.get_rng_state_all())
    latest = _latest
    if latest.on_cpu != on_cpu:  # 5 KB, which thousands of residuals keep
        _latest = latest = _Randomness(on_cpu)
    return latest


class _Randomness:
    """The state of the default generators. Called, it makes a context in which they have it."""

    def __init__(self, on_cpu: bytes, on_devices: Sequence[Tensor] = ()) -> None:
        self.on_cpu, self._on_devices = on_cpu, on_devices

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=range(len(self._on_devices))):
            torch.set_rng_state(torch.frombuffer(bytearray(self.on_cpu), dtype=torch.uint8))
            for device, on_device in enumerate(self._on_devices):
                torch.cuda.set_rng_state(on_device, device)
            yield

    def is_current(self) -> bool:
        """Whether the generators still have it."""
        now = randomness()
        return now.on_cpu == self.on_cpu and all(map(torch.equal, now._on_devices, self._on_devices))


_latest = _Randomness(b"")
_HAS_CUDA = torch.backends.cuda.is_built()


def modes() -> tuple[torch.dtype | None, ...]:
    """Return what dtypes of results depend on."""
    return (*autocast(), torch.get_default_dtype())


def autocast() -> list[torch.dtype | None]:
    """Return for each kind of device the dtype that autocast uses, None where it is off."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in AUTOCAST]


def _recording() -> contextlib.AbstractContextManager[Any]:
    if torch.is_inference_mode_enabled():
        return _recording_outside_inference_mode()
    if _is_alone():
        return NOTHING if torch.is_grad_enabled() else torch.enable_grad()
    return _recording_apart()


def _is_alone() -> bool:
    """Whether torch does nothing around this call, which is another framework's, that must be kept out of it."""
    return _top_saved_tensors_default_hooks(False) is None and _is_fwd_grad_enabled()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Take saved-tensor hooks off, and switch forward mode on, which an autograd function switches off."""
    hooks = []
    while _saved_tensors_hooks_is_enabled() and (pair := _top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        _pop_saved_tensors_default_hooks()
    try:
        with _set_fwd_grad_enabled(True):
            yield
    finally:
        for pair in reversed(hooks):
            _push_saved_tensors_default_hooks(*pair)


@contextlib.contextmanager
def _recording_apart() -> Iterator[None]:
    with _apart(), torch.enable_grad():
        yield


@contextlib.contextmanager
def _recording_outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _edges(outputs: Sequence[Tensor | None]) -> list[GradientEdge | None]:
    return [None if y is None else _edge(y) for y in outputs]


def _edge(output: Tensor) -> GradientEdge | None:
    """Return where an output enters the graph; an output that is itself a leaf enters by a view of it."""
    if not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):  # which needs to be kept alive
        return get_gradient_edge(output if node is not None else output.view_as(output))
    return GradientEdge(node, output.output_nr)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient as a dense tensor; an embedding may give a sparse one."""
    return gradient.to_dense() if gradient is not None and gradient.layout is not torch.strided else gradient


def _rows(gradient: Tensor | None) -> Tensor | Rows | None:
    """Return a sparse gradient as rows, if it is made of whole ones."""
    if gradient is None or gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        return _dense(gradient)
    if not isinstance(gradient, FakeTensor):  # optimisers of others may square each row that is there twice by itself
        gradient = gradient.coalesce()
    return Rows(gradient._indices()[0], gradient._values(), tuple(gradient.shape))


def _leaves(edges: Sequence[GradientEdge | None]) -> list[Tensor]:
    """Return the leaf tensors of the graph, in the order in which a walk from the outputs meets them."""
    pending: list[Node] = [edge.node for edge in edges if edge is not None]
    seen: set[Node] = set()
    found: dict[int, Tensor] = {}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return list(found.values())


def _names(fn: Callable[..., Any]) -> dict[int, str]:
    """Return names for the tensors that a function can reach, by itself or in a module."""
    names: dict[int, str] = {}
    for name, value in reachable(fn).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
        elif isinstance(value, torch.nn.Module):
            for inner, parameter in value.named_parameters():
                names.setdefault(id(parameter), f"{name}.{inner}".lstrip("."))
    return names
