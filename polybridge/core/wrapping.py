"""`wrap`, the front door, and `convert`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, overload

from polybridge.core import trees
from polybridge.core.applied import Applied
from polybridge.core.backend import Backend
from polybridge.core.bridge import Bridge
from polybridge.core.closures import is_module
from polybridge.core.errors import (
    FactoryError,
    NotCallableError,
    UnbuiltError,
    UnsupportedTensorError,
    WrongFrameworkError,
    did_you_mean,
)
from polybridge.core.exchange import CopyPolicy, Exchange, array_to, move
from polybridge.core.factories import Factory, resolve
from polybridge.core.functional import Functional, place
from polybridge.core.modules import ModuleLibrary
from polybridge.core.programs import UserFunction
from polybridge.core.registry import get_backend, registry
from polybridge.core.relay import FunctionRelay, Outcome
from polybridge.core.rules import Rule, RuledFunction, Vjp
from polybridge.core.specs import check_promise
from polybridge.core.trees import Classifier, Kind, Structure

_RANDOM = re.compile(r"kwargs\['(key|rngs?)'\]")  # what JAX's libraries call the source of random numbers
_RELAYS = 256  # structures and static values that one wrapped function keeps a relay for


@overload
def wrap(
    fn: Callable[..., Any],
    *,
    dst: str,
    src: str | None = None,
    vjp: Vjp = None,
    jvp: Callable[..., Any] | None = None,
    params: Any = None,
    state: Any = None,
    copy: CopyPolicy = "auto",
    sparse: bool | None = None,
    output_specs: Any = None,
    factory: Factory | None = None,
    **options: Any,
) -> Any: ...


@overload
def wrap(
    *,
    dst: str,
    src: str | None = None,
    vjp: Vjp = None,
    jvp: Callable[..., Any] | None = None,
    params: Any = None,
    state: Any = None,
    copy: CopyPolicy = "auto",
    sparse: bool | None = None,
    output_specs: Any = None,
    factory: Factory | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]: ...


def wrap(
    fn: Any = None,
    *,
    dst: str,
    src: str | None = None,
    vjp: Vjp = None,
    jvp: Callable[..., Any] | None = None,
    params: Any = None,
    state: Any = None,
    copy: CopyPolicy = "auto",
    sparse: bool | None = None,
    output_specs: Any = None,
    factory: Factory | None = None,
    **options: Any,
) -> Any:
    """Return `fn`, written in framework `src`, as a function or module of framework `dst`; without `fn`, a decorator.

    Arguments may be any tree of lists, tuples, dicts, named tuples and dataclasses. Tensors of `dst` (and NumPy
    arrays, as constants) reach `fn` as tensors of `src`; every other value reaches it unchanged. The result has the
    structure that `fn` gave it. Floating and complex tensors are differentiable to any order, by `dst`'s own means.

    Args:
        fn: takes and returns trees of `src` tensors. Tensors that it closes over are constants.
        dst: the framework of the caller: "torch", "tensorflow", "jax", "numpy", "keras" or another that is registered.
            If it is that of `fn`, `fn` itself is returned, unless it is given a rule.
        src: the framework of `fn`, likewise. A module shows its own, and so does a function that `wrap` has returned.
        vjp: a derivative instead of the framework's own, written in `src`. Either `(fwd, bwd)`, as `jax.custom_vjp`
            takes them: `fwd(*args, **kwargs)` returns `(out, residuals)`, and `bwd(residuals, ct)` returns a tuple with
            a cotangent for each positional argument (and a dict of those of the keyword arguments, if these have
            tensors). `ct` is a tree like the result, a cotangent like an argument, with None for what is no
            floating or complex tensor; None in the tuple stands for "no influence". Or "finite-difference":
            central differences, two evaluations for each number in the inputs.
        jvp: a rule for forward mode, as `jax.custom_jvp` takes it: `jvp(primals, tangents)` returns
            `(out, tangents_out)`.
        params: the weights of `fn`, a tree of `src` tensors that it takes as first argument; `fn` is then a module.
        state: its statistics and counters, a tree that it takes as second argument; it then returns `(out, state)`.
            Without `params=`, what a module of Equinox is called with.
        copy: "auto" shares memory where nobody can write to it and copies elsewhere; True always copies;
            False never does: then neither side may write in place to what crosses.
        sparse: whether the gradient of a table in which `fn` looked rows up arrives as these rows, where `src` gives
            it so: as `tf.IndexedSlices` or a sparse torch tensor. None is yes for `dst="tf"`, whose optimisers all
            take them, and no for torch, whose need not.
        output_specs: a tree of `polybridge.TensorSpec` like the result's, for functions whose result's shape and
            dtype cannot be found without running them, when they are traced into a graph. What is no tensor in the
            result is the same there.
        factory: for a module that is to be saved: a function that builds it again, or with `params=` returns
            `(fn, params)` or `(fn, params, state)`. An import finds it, or `polybridge.register_factory` has named it;
            or a `functools.partial` of such a one.
        **options: for a module, what `dst`'s own modules are given when they are made, such as `name=` and `dtype=` of
            a Keras layer.

    Raises:
        NotCallableError: `fn` is not callable.
        WrongFrameworkError: `src` is not the framework of a module, or of a function that was wrapped before.
        UnbuiltError: a module makes its weights at its first call, and `dst` needs them now.
        UnknownBackendError, BackendNotInstalledError, BrokenPluginError: a framework cannot be had.

    The wrapped function raises:
        WrongFrameworkError: an argument is a tensor of another framework.
        UnsupportedTensorError: an argument or a result cannot cross, such as a string tensor.
        OutputError: a result is a tensor of another framework, or none where a derivative is asked; or what a rule
            returned does not fit.
        NotDifferentiableError: a derivative is asked that neither the source nor a rule has.
        MutationError: `fn` wrote to memory that it shares with the caller.
    """
    if fn is None:
        own = {"vjp": vjp, "jvp": jvp, "params": params, "state": state, "copy": copy, "sparse": sparse}
        own |= {"output_specs": output_specs, "factory": factory}
        return functools.partial(wrap, src=src, dst=dst, **own, **options)
    if copy != "auto" and not isinstance(copy, bool):
        raise ValueError(f'`polybridge.wrap` takes copy="auto", True or False, got {copy!r}.')
    check_promise(output_specs)
    rule = Rule.of(vjp, jvp)
    found = _functional(fn, src, params, state)
    library = registry.library(dst)
    if found is not None and library is not None:
        if rule is not None:
            raise ValueError(
                "`polybridge.wrap` takes vjp= and jvp= for functions only: wrap one that calls the module."
            )
        origin, functional = found
        if origin is library:
            return fn
        given = {"src": src, "dst": dst, "copy": copy, "sparse": sparse, "output_specs": output_specs}
        make: Callable[..., Any] = library.native
        _check_options(make, options, library.name)
        return make(_bridge(functional, library, {**given, "factory": factory}), **options)
    if not callable(fn):
        raise NotCallableError.got(fn)
    if factory is not None or options:
        names = ["factory", *options] if factory is not None else list(options)
        raise TypeError(
            f"`polybridge.wrap` takes {', '.join(names)}= for modules only, and only where dst= has modules."
            f"{did_you_mean(names[-1], inspect.signature(wrap).parameters)}"
        )
    if params is not None:
        raise TypeError(f"`polybridge.wrap` takes params= only where dst= has modules, and {dst} has none.")
    source = get_backend(src) if src is not None else found and found[1].backend
    known = _bridged.get(fn) if inspect.isfunction(fn) else None
    if source is None:
        source = known
    if source is None:
        raise TypeError(
            f"`polybridge.wrap` needs src=, the framework that a function is written in, to wrap {fn!r:.80}; only that "
            f"of a module, or of what was wrapped before, is known."
        )
    if known is not None and source.name != known.name:
        raise WrongFrameworkError.bridged(fn.__name__, known.name, source.name)
    dest = get_backend(dst)
    if source is dest and rule is None:
        return fn
    if rule is None and not source.derivatives:
        rule = Rule()
    function = dest.decorate(_Wrapped(fn, _exchange(dest, source, copy, sparse), output_specs, rule).function())
    if inspect.isfunction(function):
        _bridged[function] = dest
    return function


# The framework of each function that `wrap` has returned. An attribute would be copied by `functools.wraps`.
_bridged: weakref.WeakKeyDictionary[Callable[..., Any], Backend] = weakref.WeakKeyDictionary()


def _check_options(make: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raise a TypeError unless the modules of a library take these options."""
    known = inspect.signature(make).parameters
    unknown = [] if "options" in known else [option for option in options if option not in known]
    if unknown:
        hint = did_you_mean(unknown[0], [*inspect.signature(wrap).parameters, *known])
        raise TypeError(f"`polybridge.wrap` takes no {', '.join(unknown)}= where it makes a module of {name}.{hint}")


def _functional(fn: Any, src: str | None, params: Any, state: Any) -> tuple[ModuleLibrary | None, Functional] | None:
    """Return `fn` as a function of its weights and the library that it is a module of; None if it is no module."""
    if params is None:
        found = registry.functional(fn if state is None else (fn, state))
        if found is None and state is not None:
            raise TypeError("`polybridge.wrap` takes state= with params=, or with a module that is called with it.")
        if found is None or src is None or get_backend(src) is found[1].backend:
            return found
        raise WrongFrameworkError.module(type(fn), found[0].name, src)
    if src is None:
        raise TypeError("`polybridge.wrap` needs src=, the framework of a function and its params=.")
    backend = get_backend(src)
    _check_weights(backend, params, "params")
    _check_weights(backend, state, "state")
    return None, Applied(fn, backend, params, state)


def _check_weights(backend: Backend, tree: Any, name: str) -> None:
    """Raise a WrongFrameworkError where a weight is another framework's: it would be a constant that nobody trains."""
    leaves, treedef = trees.flatten(tree)
    for position, leaf in enumerate(leaves):
        owner = None if backend.is_tensor(leaf) or isinstance(leaf, trees.ARRAYS) else registry.owner(leaf)
        if owner is not None and owner.is_tensor(leaf):
            where = trees.path(treedef, position, name)
            raise WrongFrameworkError.argument("polybridge.wrap", where, type(leaf), backend.name)


def _exchange(dest: Backend, source: Backend, copy: CopyPolicy, sparse: bool | None) -> Exchange:
    if sparse and dest.takes_rows is None:
        raise ValueError(f"`polybridge.wrap` was given sparse=True, but {dest.name} has no sparse gradients.")
    return Exchange(dest, source, copy, sparse=bool(dest.takes_rows if sparse is None else sparse))


def cooked(recipe: Mapping[str, Any], dst: str, **options: Any) -> Any:
    """Return the module of `dst` that a recipe of `Bridge.recipe` is of.

    Raises:
        FactoryError: its factory cannot be found here.
    """
    given = dict(recipe)
    factory = resolve(given.pop("factory"))
    fn, params, state = _parts(factory())
    return wrap(fn, dst=dst, params=params, state=state, factory=factory, **given, **options)


def _parts(built: Any) -> tuple[Any, Any, Any]:
    """Return what a factory has built as a module or function, its params and its state."""
    fn, params, state = (*(built if isinstance(built, tuple) else (built,)), None, None)[:3]
    return fn, params, state


def _bridge(functional: Functional, library: ModuleLibrary, options: dict[str, Any]) -> Bridge:
    source, dest = functional.backend, library.backend
    if not functional.built and not library.builds:
        raise UnbuiltError.before_wrap(functional.name, library.name)
    run, specs = functional.call, options["output_specs"]
    if source is dest:
        return Bridge(functional, dest, run, options)
    if specs is not None:
        run, specs = functional.promising(specs)
    exchange = _exchange(dest, source, options["copy"], options["sparse"])
    wrapped = _Wrapped(run, exchange, specs, name=functional.name)
    return Bridge(functional, dest, dest.decorate(wrapped.function()), options)


def bridged_again(found: dict[str, Any], options: dict[str, Any], names: list[str]) -> Bridge:
    """Return the bridge of which `Bridge.__reduce__` has written these things down.

    Raises:
        FactoryError: the factory cannot be found, or builds another module.
    """
    if "factory" in found:
        factory = resolve(found["factory"])
        built = factory()
        options = {**options, "factory": factory}
    else:
        built = pickle.loads(found["pickled"])
    fn, params, state = _parts(built)
    functional = _functional(fn, options["src"], params, state)
    library = registry.library(options["dst"])
    if functional is None or library is None:
        raise FactoryError.other(found.get("factory"), names, [])
    bridge = _bridge(functional[1], library, options)
    made = [slot.name for slot in bridge.slots]
    if made != names and bridge.built:
        raise FactoryError.other(found.get("factory"), names, made)
    return bridge


def convert(tree: Any, to: str) -> Any:
    """Return the tree with every tensor, of whatever framework, as a tensor of `to`.

    Values only: the result carries no gradient history (a torch tensor in the middle of a graph is refused; call
    `.detach()` to say that this is meant). Memory is shared where nobody can write to it. Other leaves stay.

    Args:
        tree: any tree of lists, tuples, dicts, named tuples and dataclasses.
        to: the name of a backend.

    Raises:
        UnsupportedTensorError: a tensor that the other side cannot hold; the message has its path.
    """
    target = get_backend(to)
    leaves, treedef = trees.flatten(tree)
    for position, leaf in enumerate(leaves):
        if target.is_tensor(leaf):
            continue
        if isinstance(leaf, trees.ARRAYS):
            leaves[position] = array_to(target, leaf, "polybridge.convert", trees.path(treedef, position, "tree"))
        elif trees.hides(leaf, lambda held: isinstance(held, trees.ARRAYS) or registry.owner(held) is not None):
            error = UnsupportedTensorError.composite(leaf)
            raise error.at("polybridge.convert", trees.path(treedef, position, "tree"))
        elif (owner := registry.owner(leaf)) is not None:
            try:
                if not owner.is_tensor(leaf):
                    raise UnsupportedTensorError.composite(leaf)
                owner.check_detached(leaf)
                leaves[position] = move(leaf, owner, target, own=owner.writes or target.writes)
            except UnsupportedTensorError as error:
                raise error.at("polybridge.convert", trees.path(treedef, position, "tree")) from None
    return trees.unflatten(treedef, leaves)


class _Wrapped:
    """A function between two backends, with a native function for each structure of its arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        exchange: Exchange,
        output_specs: Any,
        rule: Rule | None = None,
        name: str | None = None,
    ) -> None:
        self.fn, self.exchange, self.output_specs, self.rule = fn, exchange, output_specs, rule
        name = name or getattr(fn, "__name__", type(fn).__name__)
        self.call = f"{name} (src={exchange.source.name!r}, dst={exchange.dest.name!r})"
        self.arguments = classifier(exchange.dest)
        self.results = classifier(exchange.source)
        self.natives: OrderedDict[Any, Callable[..., Outcome]] = OrderedDict()
        self.positional: dict[int, Callable[..., Outcome]] = {}  # for that many tensors and nothing else

    def function(self) -> Callable[..., Any]:
        """Return the function that the caller sees."""

        natives, positional, arguments, convert = self.natives, self.positional, self.arguments, self.convert
        are_tensors = arguments.tensors.issuperset

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            native = positional.get(len(args)) if not kwargs and are_tensors(map(type, args)) else None
            if native is None:
                tensors, structure = trees.separate_arguments(args, kwargs, arguments, convert)
                outcome = (natives.get(structure.key()) or self.native(structure))(*tensors)
            else:
                outcome = native(*args)
            leaves, result = outcome.leaves, outcome.structure
            assert result is not None
            return leaves[0] if result is trees.ONE else result.rebuild(leaves)

        functools.update_wrapper(wrapped, self.fn, updated=())
        if not hasattr(self.fn, "__name__"):
            wrapped.__name__ = wrapped.__qualname__ = type(self.fn).__name__
        # No `__wrapped__`: TensorFlow follows it, and would call the foreign function itself.
        del wrapped.__wrapped__  # type: ignore[attr-defined]
        with contextlib.suppress(ValueError):  # of a builtin, whose signature nobody knows
            wrapped.__signature__ = inspect.signature(self.fn)  # type: ignore[attr-defined]
        return wrapped

    def convert(self, kind: Kind, leaf: Any, treedef: Any, position: int) -> Any:
        """Return a NumPy array as a tensor of the caller's framework; refuse everything else."""
        dest = self.exchange.dest
        where = trees.argument_path(treedef, position)
        if is_module(self.fn):
            where = place(where)
            if kind is Kind.FOREIGN and self.is_randomness(where):
                raise WrongFrameworkError.random(self.call, where, type(leaf), dest.name)
        if kind is Kind.ARRAY:
            return array_to(dest, leaf, self.call, where)
        if kind is Kind.COMPOSITE:
            raise UnsupportedTensorError.composite(leaf, dest.advice(leaf)).at(self.call, where)
        raise WrongFrameworkError.argument(self.call, where, type(leaf), dest.name)

    def is_randomness(self, where: str) -> bool:
        """Whether an argument of a module is named as a source of random numbers, and not one of its own."""
        found = _RANDOM.match(where)
        own = self.fn.__self__.signature()  # type: ignore[attr-defined]
        return found is not None and (own is None or found[1] not in own.parameters)

    def native(self, structure: Structure) -> Callable[..., Outcome]:
        """Return the native function for arguments of this structure, made at its first call."""
        key = structure.key()
        native = self.natives.get(key)
        if native is None:
            function = UserFunction if self.rule is None else functools.partial(RuledFunction, self.rule)
            program = function(self.fn, self.call, self.exchange.source, structure, self.results)
            relay = FunctionRelay(program, self.exchange, self.output_specs)
            native = self.natives.setdefault(key, self.exchange.dest.wrap_as_native(relay))
            if trees.is_positional(structure):
                self.positional[len(structure.dynamic)] = native
            while len(self.natives) > _RELAYS:
                self.natives.popitem(last=False)
        return native


@functools.cache
def classifier(backend: Backend) -> Classifier:
    """Return the classifier of a backend, which asks once per type of leaf, of containers each time."""

    def foreign(leaf: Any) -> bool:
        return hasattr(type(leaf), "__dlpack__") or registry.owner(leaf) is not None

    return trees.Classifier(backend.is_tensor, backend.is_composite, foreign, registry.is_tree)
