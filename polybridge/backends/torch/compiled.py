"""How torch's compiler and exporter see a relay: as operations of torch's own, which they cannot look into.

`call` is what an exported graph has. Where gradients are wanted it becomes `vjp`, whose last result is the token of the
residual, and in the backward `pull`. Functions cross by name, since graphs hold no Python objects.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame  # private, see `decorate` (torch 2.13)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private, as in source.py
from torch._subclasses.functional_tensor import FunctionalTensor  # private: what the compiler traces with (torch 2.13)
from torch.utils import _pytree  # private: what the compiler takes results apart with (torch 2.13)

from polybridge.backends.torch import convert, source, symbolic
from polybridge.core import orders, residuals
from polybridge.core.abstract import Abstract
from polybridge.core.batching import BatchedRelay
from polybridge.core.errors import CompilationError, PromisedShapeError, ResidualError
from polybridge.core.exchange import Exchange
from polybridge.core.relay import FunctionRelay, Outcome, Relay

Tensor = torch.Tensor

_TRACED = frozenset({FakeTensor, FunctionalTensor})  # the types of tensors while a graph is traced
_PROCESS = uuid.uuid4().hex  # a graph that was saved must not find another function under the same name
_entries: dict[str, _Entry] = {}  # for as long as the process, as nobody knows how long a graph lives
_places = itertools.count()  # of calls in graphs: torch merges operations with equal arguments, which may be random
_names: dict[tuple[Any, ...], str] = {}  # by the id of a relay, and autocast
_identities = itertools.count()  # of decorated functions


is_compiling = torch.compiler.is_compiling


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a branch for the compiler, which puts it into its graph without looking inside.

    The compiler is told so while it traces: its package takes a second to import, which most programs never need. It
    reuses a graph for another function of the same code unless a value that it has read differs, hence the identity: a
    string, since numbers that differ become symbols.
    """
    identity = f"{next(_identities)}"
    opaque: dict[str, Callable[..., Any]] = {}

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if torch.compiler.is_dynamo_compiling():
                mark()
                return opaque[identity](*_without_none(args), **_without_none(kwargs))
            return function(*_numbers(args), **_numbers(kwargs))
        return function(*args, **kwargs)

    def told(*args: Any, **kwargs: Any) -> Any:
        """Call the function; the compiler says nothing of what it raises, but its name."""
        opaque[identity].__name__ = function.__name__
        try:
            return function(*args, **kwargs)
        except Exception as error:
            opaque[identity].__name__ = f"{function.__name__}, which raised {type(error).__name__}: {error}"
            raise

    def mark() -> None:
        if not opaque:
            import torch._dynamo

            run = torch._dynamo.disable(functools.wraps(function)(told))
            opaque[identity] = torch._dynamo.nonstrict_trace(_traced(run))

    mark._dynamo_marked_constant = True  # type: ignore[attr-defined] # what `assume_constant_result` sets: really run it
    del called.__wrapped__
    _eval_frame.set_code_exec_strategy(function.__code__, _NEVER)  # after a graph break: we are no code to compile
    return called


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a graph has of a function."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        result = function(*_numbers(args), **_numbers(kwargs))
        if torch.compiler.is_dynamo_compiling():  # a frame of its own, not a call in a graph: the graph broke here
            return result
        return _pytree.tree_map_only(_is_static, _Static, result)

    return traced


_NEVER = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def _without_none(tree: Any) -> Any:
    """Return the tree with a node that has no leaves for each None, which the compiler does not take for a leaf.

    The compiler reads this, and does not understand pytree's own functions where there are named tuples (torch 2.13).
    """
    if tree is None:
        return _Static(None)
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_none(value) for value in tree]
    if isinstance(tree, tuple):
        values = [_without_none(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree


def _numbers(tree: Any) -> Any:
    """Return the tree with numbers for symbols: a graph is for one value of what is no tensor."""
    return _pytree.tree_map_only(tuple(_NUMBERS), lambda symbol: _NUMBERS[type(symbol)](symbol), tree)


_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class _Static:
    """A value of a result that is no tensor, which the compiler takes for a part of the result's structure."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_static(value: Any) -> bool:
    return not isinstance(value, Tensor)


def _value(_: Any, value: Any) -> Any:
    return value


_pytree.register_pytree_node(_Static, lambda static: ([], static.value), _value)


class _Entry:
    """A function that graphs may call, and its plans by what is known of its inputs.

    Args:
        relay: the function.
        autocast: where it was traced; the compiler switches it off where the graph runs.
    """

    def __init__(self, relay: FunctionRelay | BatchedRelay, autocast: Sequence[torch.dtype | None]) -> None:
        self.relay, self._autocast = relay, autocast
        self.plans: dict[Any, symbolic.Plan] = {}

    def as_traced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the function runs as it was traced."""
        return source.autocasting(self._autocast) if any(self._autocast) else contextlib.nullcontext()

    def plan(self, xs: Sequence[Tensor]) -> symbolic.Plan:
        modes = self.relay.exchange.source.modes()
        found = self.plans.get((modes, *symbolic.key(xs)))
        if found is None:
            found = symbolic.plan(self.relay, xs)
            self.plans[modes, *symbolic.key(xs)] = found  # under another key where symbols have become numbers
        return found

    def checked(self, leaves: Sequence[Any], xs: Sequence[Tensor], kinds: str, sizes: Sequence[int]) -> list[Tensor]:
        """Return results that keep what was promised, and share no memory with an input, as `copy=False` lets them."""
        if [(y.dtype, y.dim()) for y in leaves] != _kinds(kinds):
            found = " ".join(f"{convert.dtype_name(y)}/{y.dim()}" for y in leaves)
            raise PromisedShapeError.differs(self.relay.call, "the result", f"dtypes/ranks {found}", kinds)
        given = symbolic.sizes(leaves)
        if any(p not in (n, -1) for n, p in zip(given, sizes, strict=True)):
            raise PromisedShapeError.differs(self.relay.call, "the result", f"sizes {given}", f"sizes {list(sizes)}")
        inputs = {x.untyped_storage().data_ptr() for x in xs}
        return [y.clone() if y.untyped_storage().data_ptr() in inputs else y for y in leaves]

    def wanted(self, xs: Sequence[Tensor]) -> list[int]:
        """Return the positions of the inputs that want a gradient and, as far as the plan can tell, have one."""
        candidates = [i for i, x in enumerate(xs) if convert.is_differentiable(x)]
        connected = self.plan(xs).connected if is_traced(xs) else None
        return [
            i
            for i, c in zip(candidates, connected or (True,) * len(candidates), strict=True)
            if c and xs[i].requires_grad
        ]


def is_traced(xs: Sequence[Tensor]) -> bool:
    """Whether a graph is being traced through these tensors."""
    return not _TRACED.isdisjoint(map(type, xs)) or _is_recording()


def is_tracing(mode: FakeTensorMode | None, xs: Sequence[Tensor]) -> bool:
    """Whether somebody makes a graph, as opposed to tensors that are fake for their specs alone.

    Args:
        mode: under which this thread runs on fake tensors.
        xs: the inputs of a call.
    """
    if _is_recording() or any(type(x) is FunctionalTensor for x in xs):
        return True
    modes = (mode, *(x.fake_mode for x in xs if type(x) is FakeTensor))
    return torch.compiler.is_compiling() and all(m is None or m.shape_env is not None for m in modes)


def _is_recording() -> bool:
    """Whether a tracer such as `make_fx` is on, as `source.fake_mode`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def name_of(relay: FunctionRelay | BatchedRelay) -> str:
    """Return the name of a relay in graphs, which is given once."""
    autocast = source.autocast()
    key = id(relay), *autocast
    name = _names.get(key)
    if name is None:
        name = f"{relay.call} #{len(_names)} of {_PROCESS}"
        _entries[name] = _Entry(relay, autocast)
        _names[key] = name
    return name


def abstract(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor]) -> Abstract:
    """Return the plan of a relay at tensors of a trace, with all differentiable ones wanted."""
    return _entries[name_of(relay)].plan(xs).abstract


def call(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor]) -> list[Tensor]:
    """Evaluate a relay in a trace; autograd follows."""
    name = name_of(relay)
    plan = _entries[name].plan(xs)
    return torch.ops.polybridge.call.default(name, list(xs), plan.kinds, plan.sizes(xs), next(_places))


def vjp(relay: FunctionRelay | BatchedRelay, xs: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """Evaluate a relay in a trace, and return the token of its residual after the results."""
    name = name_of(relay)
    plan = _entries[name].plan(xs)
    return torch.ops.polybridge.vjp.default(name, list(xs), list(wanted), plan.kinds, plan.sizes(xs), next(_places))


def pull(counts: Sequence[int], token: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Pull cotangents back, in a trace or not; see `core.orders`."""
    if is_traced((token, *values)):
        return torch.ops.polybridge.pull.default(token, list(values), list(counts))
    return _pull(token, values, counts)


# What the operations do when a graph runs.


def _entry(function: str) -> _Entry:
    entry = _entries.get(function)
    if entry is None:
        raise CompilationError.elsewhere(function.rpartition(" #")[0])
    return entry


@functools.cache
def _kinds(kinds: str) -> list[tuple[torch.dtype, int]]:
    return [(convert.torch_dtype(name), int(rank)) for name, _, rank in (kind.partition("/") for kind in kinds.split())]


def _call(function: str, xs: Sequence[Tensor], kinds: str, sizes: Sequence[int], place: int) -> list[Tensor]:
    entry = _entry(function)
    with _as_called(), entry.as_traced():
        return entry.checked(entry.relay(xs).leaves, xs, kinds, sizes)


def _vjp(
    function: str, xs: Sequence[Tensor], wanted: Sequence[int], kinds: str, sizes: Sequence[int], place: int
) -> list[Tensor]:
    entry = _entry(function)
    lent, weights = _lent(xs, entry.relay.exchange)
    with _as_called(), torch.enable_grad(), entry.as_traced():
        outcome, back = entry.relay.vjp(lent, wanted)
        leaves = entry.checked(outcome.leaves, xs, kinds, sizes)
        return [*leaves, torch.from_numpy(residuals.keep(_Watched(back, weights) if weights else back))]


def _lent(xs: Sequence[Tensor], exchange: Exchange) -> tuple[Sequence[Tensor | None], list[Tensor]]:
    """Return what a residual may share memory with until the backward: copies, and weights, which are to be watched.

    The compiler lets what comes later in the graph write to the memory of what it has computed and reads no more (it
    may compute it again for the backward). Of the caller's tensors it watches those that it has saved itself.
    """
    if not exchange.by_dlpack and exchange.copy is not False:
        return xs, []  # NumPy's are copies
    weights = [x if isinstance(x, torch.nn.Parameter) and not x.is_inference() else None for x in xs]
    rest = exchange.copies([x if w is None else None for x, w in zip(xs, weights, strict=True)])
    lent = [w if x is None else x for x, w in zip(rest, weights, strict=True)]
    return lent, [w for w in weights if w is not None]


class _Watched(Relay):
    """A residual that shares memory with weights."""

    def __init__(self, back: Relay, weights: Sequence[Tensor]) -> None:
        self.exchange, self.call = back.exchange, back.call
        self._back, self._versions = back, [(weight, weight._version) for weight in weights]

    def __call__(self, xs: Sequence[Tensor | None]) -> Outcome:
        return self._unchanged()(xs)

    def vjp(self, xs: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Outcome, Relay]:
        return self._unchanged().vjp(xs, wanted)

    def rows(self, xs: Sequence[Tensor | None]) -> Outcome:
        return self._unchanged().rows(xs)

    def push(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        return self._unchanged().push(tangents)

    def _unchanged(self) -> Relay:
        if any(weight._version != version for weight, version in self._versions):
            raise ResidualError.written(self.call)
        return self._back


def _pull(token: Tensor, values: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    cts = [values[a:b] for a, b in itertools.pairwise(ends)]
    with _as_called(), torch.enable_grad():
        found = orders.pull(residuals.kept(int(token[0])), values[: ends[0]], cts)
    return [
        torch.zeros_like(v, memory_format=torch.contiguous_format) if x is None else x
        for x, v in zip(found, values, strict=False)
    ]


def _as_called() -> Any:
    """Let torch do again what is off inside of an operation: the foreign function may call torch again.

    That is autograd, function transforms, and lazy conjugation, without which numbers are wrong. Autocast stays.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded & _excluded_from_the_start())


@functools.cache
def _excluded_from_the_start() -> Any:
    """Return what a thread excludes before anybody asks for it; private: nothing public shows it (torch 2.13)."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(torch._C._dispatch_tls_local_exclude_set).result()


# What they promise while a graph is traced.


def _promised_call(function: str, xs: Sequence[Tensor], kinds: str, sizes: Sequence[int], place: int) -> list[Tensor]:
    return _entry(function).plan(xs).empty(sizes)


def _promised_vjp(
    function: str, xs: Sequence[Tensor], wanted: Sequence[int], kinds: str, sizes: Sequence[int], place: int
) -> list[Tensor]:
    return [*_promised_call(function, xs, kinds, sizes, place), torch.empty(1, dtype=torch.int64, device="cpu")]


def _promised_pull(token: Tensor, values: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(v, memory_format=torch.contiguous_format) for v in values[: len(values) - counts[-1]]]


def _followed(function: str, xs: Sequence[Tensor], kinds: str, sizes: Sequence[int], place: int) -> list[Tensor]:
    """Call so that autograd follows."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        from polybridge.backends.torch import transforms  # which imports this module

        entry = _entry(function)
        with entry.as_traced():
            return transforms.followed(entry.relay, xs, entry.wanted(xs))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.polybridge.call.default(function, xs, kinds, sizes, place)


_library = torch.library.Library("polybridge", "DEF")
for _signature, _run, _promised in (
    ("call(str function, Tensor[] xs, str kinds, SymInt[] sizes, int place) -> Tensor[]", _call, _promised_call),
    (
        "vjp(str function, Tensor[] xs, int[] wanted, str kinds, SymInt[] sizes, int place) -> Tensor[]",
        _vjp,
        _promised_vjp,
    ),
    ("pull(Tensor token, Tensor[] values, int[] counts) -> Tensor[]", _pull, _promised_pull),
):
    _library.define(_signature, tags=torch.Tag.pt2_compliant_tag)
    _name = _signature.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polybridge::{_name}", _promised, lib=_library)
_library.impl("call", _followed, "Autograd")
torch.fx.has_side_effect(torch.ops.polybridge.vjp.default)  # it keeps a residual: not to be run ahead and copied
