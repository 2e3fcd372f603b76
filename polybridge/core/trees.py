"""Call arguments and results <-> flat tensors and the static rest, on optree.

Everything is flattened once at the edge and rebuilt once at the edge; in between there are flat lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import ChainMap, OrderedDict, UserDict, UserList
from collections.abc import Callable, Container, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import optree

NAMESPACE = "polybridge"

# Two dicts of another order are two structures: the function sees its arguments in the caller's order.
_insertion_ordered = contextlib.ExitStack()
_insertion_ordered.enter_context(optree.dict_insertion_ordered(True, namespace=NAMESPACE))


class Kind(Enum):
    """What a leaf is to one backend."""

    TENSOR = "tensor"  # one of its tensors
    ARRAY = "array"  # a NumPy array or scalar: converted, never differentiated
    STATIC = "static"  # reaches the function unchanged
    COMPOSITE = "composite"  # made of tensors, but not one (sparse, ragged, symbolic), or no container of the tree
    FOREIGN = "foreign"  # a tensor of another framework


ARRAYS = (np.ndarray, np.generic)

# Containers that optree takes for leaves, as it looks into no subclass; what nobody looks into must hold no tensors.
_MAPPINGS = (dict, UserDict, ChainMap, types.MappingProxyType)
_CONTAINERS: tuple[type, ...] = (
    *_MAPPINGS,
    list,
    tuple,
    set,
    frozenset,
    UserList,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# What computes its values later, when the call is over, and once.
_PENDING = (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType, map, filter, zip, enumerate)

Classify = Callable[[Any], Kind]
"""Says what a leaf is."""


class Structure:
    """The shape of a tree: where its dynamic leaves are, and every other leaf.

    Args:
        treedef: optree's description of the containers.
        leaves: all leaves, with None where a dynamic one stood.
        dynamic: the positions of the dynamic leaves.
        build: makes the tree of its dynamic leaves, where that needs no treedef.
    """

    __slots__ = ("_build", "_leaves", "dynamic", "treedef")

    def __init__(
        self,
        treedef: Any,
        leaves: list[Any],
        dynamic: tuple[int, ...],
        build: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        """Keep the parts."""
        self.treedef = treedef
        self._leaves = leaves
        self.dynamic = dynamic
        self._build = build

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the tree with `tensors` as its dynamic leaves."""
        if self._build is not None:
            return self._build(tensors)
        if len(self.dynamic) == len(self._leaves):
            return unflatten(self.treedef, tensors)
        leaves = list(self._leaves)
        for position, tensor in zip(self.dynamic, tensors, strict=True):
            leaves[position] = tensor
        return unflatten(self.treedef, leaves)

    def like(self, values: Sequence[Any]) -> Any:
        """Return the tree with `values` as its dynamic leaves and None as every other."""
        leaves: list[Any] = [None] * len(self._leaves)
        for position, value in zip(self.dynamic, values, strict=True):
            leaves[position] = value
        return unflatten(self.treedef, leaves)

    def arity(self) -> tuple[int, bool]:
        """Return how many positional arguments `(args, kwargs)` has, and whether the others have dynamic leaves."""
        args, _ = self.treedef.children()
        return len(args.children()), any(position >= args.num_leaves for position in self.dynamic)

    def unlike(self, tree: Any) -> list[Any]:
        """Return what a tree of the same containers has in place of the dynamic leaves.

        None instead of a container stands for None in each of its leaves.

        Raises:
            ValueError: the containers differ.
        """
        leaves = _leaves_up_to(self.treedef, tree)
        return [leaves[position] for position in self.dynamic]

    def is_like(self, other: Structure) -> bool:
        """Whether the containers are the same, in the same order, and the dynamic leaves are at the same places."""
        return self is other or (self.treedef == other.treedef and self.dynamic == other.dynamic)

    def is_same(self, other: Structure) -> bool:
        """Whether the static leaves are equal too."""
        return self is other or (self.is_like(other) and self._leaves == other._leaves)

    def ordered(self, tree: Any) -> Any:
        """Return a tree with the entries of its dicts in the order that they have here.

        Raises:
            ValueError: it has other containers.
        """
        return unflatten(self.treedef, self.treedef.flatten_up_to(tree))

    def argument(self, number: int) -> str:
        """Return where the dynamic leaf `number` of `(args, kwargs)` is, as `args[0]['weights']`."""
        return argument_path(self.treedef, self.dynamic[number])

    def result(self, number: int) -> str:
        """Return where the dynamic leaf `number` of a result is, as `result['loss']`."""
        return self.path(number, "result")

    def path(self, number: int, root: str) -> str:
        """Return where the dynamic leaf `number` is in a tree that is called `root`."""
        return path(self.treedef, self.dynamic[number], root)

    def __str__(self) -> str:
        """Write the tree with `*` for each dynamic leaf."""
        return str(self.rebuild([_STAR] * len(self.dynamic)))

    @property
    def is_tensor(self) -> bool:
        """Whether the tree is one dynamic leaf and nothing else."""
        return bool(self.dynamic) and bool(self.treedef.is_leaf())

    def key(self) -> tuple[Any, ...]:
        """Return a hashable key that two calls share when one relay can serve both."""
        if len(self.dynamic) == len(self._leaves):
            return (self.treedef,)
        return (self.treedef, self.dynamic, tuple(map(_static_key, self._leaves)))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def separate(
    tree: Any, classify: Classify, convert: Callable[[Kind, Any, Any, int], Any]
) -> tuple[list[Any], Structure]:
    """Return the tensors of a tree and the structure around them.

    Args:
        tree: arguments or a result.
        classify: says what a leaf is.
        convert: makes a tensor of a leaf that is neither one nor static, given its kind, the leaf, the treedef and its
            position; or raises.
    """
    leaves, treedef = flatten(tree)
    dynamic: list[int] = []
    tensors: list[Any] = []
    for position, leaf in enumerate(leaves):
        kind = classify(leaf)
        if kind is Kind.STATIC:
            continue
        tensors.append(leaf if kind is Kind.TENSOR else convert(kind, leaf, treedef, position))
        dynamic.append(position)
        leaves[position] = None
    return tensors, Structure(treedef, leaves, tuple(dynamic))


def separate_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], classify: Classifier, convert: Callable[[Kind, Any, Any, int], Any]
) -> tuple[Sequence[Any], Structure]:
    """Return what `separate((args, kwargs), ...)` does, without a walk where tensors are all that is given."""
    if not kwargs and all(map(classify.is_tensor, args)):
        return args, _positional(len(args))
    return separate((args, kwargs), classify, convert)


def is_positional(structure: Structure) -> bool:
    """Whether it is of `(args, kwargs)` with tensors in `args` and nothing else."""
    return structure is _positional(len(structure.dynamic))


def separate_result(
    tree: Any, classify: Classifier, convert: Callable[[Kind, Any, Any, int], Any]
) -> tuple[list[Any], Structure]:
    """Return what `separate(tree, ...)` does, without a walk where the result is one tensor."""
    return ([tree], ONE) if classify.is_tensor(tree) else separate(tree, classify, convert)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, None included, and its treedef; dataclass instances count as containers."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    for leaf in leaves:
        if type(leaf) not in _no_dataclasses and not (is_leaf and is_leaf(leaf)) and _register_dataclass(leaf):
            return flatten(tree, is_leaf)
    return leaves, treedef


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree of `leaves`."""
    return optree.tree_unflatten(treedef, leaves)


def _leaves_up_to(treedef: Any, tree: Any) -> list[Any]:
    """Return what `tree` has in place of each leaf of `treedef`."""
    if tree is None:
        return [None] * treedef.num_leaves
    if treedef.is_leaf():
        return [tree]
    pieces = treedef.one_level().flatten_up_to(tree)
    return [x for inner, piece in zip(treedef.children(), pieces, strict=True) for x in _leaves_up_to(inner, piece)]


def path(treedef: Any, position: int, root: str) -> str:
    """Return where the leaf at `position` is, as Python source that starts at `root`."""
    return str(optree.treespec_accessors(treedef)[position].codify(root))


def argument_path(treedef: Any, position: int) -> str:
    """Return where a leaf of `(args, kwargs)` is, as `args[0]` or `kwargs['scale']`."""
    text = path(treedef, position, "")
    return f"args{text[3:]}" if text.startswith("[0]") else f"kwargs{text[3:]}"


def unused(name: str, used: Container[str]) -> str:
    """Return a name, with a number if it is used already."""
    number, candidate = 0, name
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


@functools.cache
def _positional(count: int) -> Structure:
    """Return the structure of `(args, kwargs)` with that many tensors in `args`."""
    _, treedef = flatten((tuple(range(count)), {}))
    return Structure(treedef, [None] * count, tuple(range(count)), lambda tensors: (tuple(tensors), {}))


def _only(tensors: Sequence[Any]) -> Any:
    (tensor,) = tensors
    return tensor


_registered: set[type] = set()  # dataclasses that optree knows
_no_dataclasses: set[type] = set()  # types of leaves that have been asked


class Classifier:
    """Says what a leaf is to one backend, which is asked once per type where no leaf of it is a tree.

    Args:
        is_tensor: whether it is a tensor of the backend.
        is_composite: whether it is made of such, without being one.
        is_foreign: whether it is a tensor of another.
        is_tree: whether it is a container to somebody, so that the next of its type may have other things in it.

    Attributes:
        tensors: the types of tensors that have been met.
    """

    def __init__(
        self,
        is_tensor: Callable[[Any], bool],
        is_composite: Callable[[Any], bool],
        is_foreign: Callable[[Any], bool],
        is_tree: Callable[[Any], bool],
    ) -> None:
        """Know the types of Python's own values."""
        self._is_tensor, self._is_composite, self._is_foreign = is_tensor, is_composite, is_foreign
        self._is_tree = is_tree
        self.tensors: set[type] = set()
        self._known = dict.fromkeys((int, float, complex, bool, str, bytes, type(None)), Kind.STATIC)

    def __call__(self, leaf: Any) -> Kind:
        """Return what it is."""
        kind = self._known.get(type(leaf))
        if kind is None:
            kind = self._ask(leaf)
            if kind is not Kind.TENSOR and not isinstance(leaf, _CONTAINERS) and not self._is_tree(leaf):
                self._known[type(leaf)] = kind
        return kind

    def is_tensor(self, leaf: Any) -> bool:
        """Whether it is a tensor of the backend."""
        kind = self._known.get(type(leaf))
        if kind is None and self._is_tensor(leaf):
            kind = self._known[type(leaf)] = Kind.TENSOR
            self.tensors.add(type(leaf))
        return kind is Kind.TENSOR

    def _ask(self, leaf: Any) -> Kind:
        if isinstance(leaf, tuple) and all(type(size) is int for size in leaf):  # such as a shape, at every call
            return Kind.STATIC
        if self.is_tensor(leaf):
            return Kind.TENSOR
        if isinstance(leaf, ARRAYS):
            return Kind.ARRAY
        if self._is_composite(leaf) or hides(leaf, self._crosses):
            return Kind.COMPOSITE
        return Kind.FOREIGN if self._is_foreign(leaf) else Kind.STATIC

    def _crosses(self, leaf: Any) -> bool:
        """Whether it is a tensor; a NumPy array that nobody looks for stays one."""
        if self.is_tensor(leaf) or self._is_composite(leaf):
            return True
        return not isinstance(leaf, ARRAYS) and self._is_foreign(leaf)


def register_like(cls: type, plain: type[list[Any]] | type[tuple[Any, ...]] | type[dict[Any, Any]]) -> None:
    """Teach optree a class that a framework makes of a plain list, tuple or dict, which is what it is rebuilt as."""

    def to_children(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...] | None, tuple[Any, ...]]:
        if plain is not dict:
            return tuple(value), None, tuple(range(len(value)))
        return tuple(value.values()), (*value,), (*value,)

    def from_children(keys: Any, children: Iterable[Any]) -> Any:
        return plain(children) if keys is None else plain(zip(keys, children, strict=True))

    _register(cls, to_children, from_children)


def hides(leaf: Any, is_value: Callable[[Any], bool]) -> bool:
    """Whether a leaf is a container whose class is none of a tree's, and holds or will make what `is_value` says."""
    if isinstance(leaf, _PENDING):
        return True
    if not isinstance(leaf, _CONTAINERS):
        return False
    held: Any = leaf.values() if isinstance(leaf, _MAPPINGS) else leaf
    return any(is_value(x) or hides(x, is_value) for x in flatten(list(held))[0])


def _register_dataclass(leaf: Any) -> bool:
    """Teach optree the dataclass that `leaf` is an instance of; return whether it is one."""
    cls = type(leaf)
    if isinstance(leaf, type) or not dataclasses.is_dataclass(leaf):
        _no_dataclasses.add(cls)
        return False
    base: Any = next((known for known in (OrderedDict, dict) if issubclass(cls, known)), object)
    try:
        base.__new__(cls)
    except TypeError:  # another built-in class is its base, such as list
        _no_dataclasses.add(cls)
        return False
    fields = tuple(field.name for field in dataclasses.fields(leaf))

    def to_children(instance: Any) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...], tuple[Any, ...]]:
        added = (name for name in getattr(instance, "__dict__", ()) if name not in fields)  # as by __post_init__
        names = (*(name for name in fields if hasattr(instance, name)), *added)
        values = tuple(getattr(instance, name) for name in names)
        if base is object:
            return values, (names, (), ()), names
        # A dict's entries, most of which are its fields once more, as in what models of Hugging Face return.
        keys = tuple(base.keys(instance))
        own = tuple(key for key in keys if base.get(instance, key) is not getattr(instance, str(key), _STAR))
        return (*values, *(base.get(instance, key) for key in own)), (names, keys, own), (*names, *own)

    def from_children(held: Any, children: Iterable[Any]) -> Any:
        instance = base.__new__(cls)  # as copy.copy does: no second __post_init__, frozen classes too
        names, keys, own = held
        given = iter(children)
        for name in names:
            object.__setattr__(instance, name, next(given))
        entries = {key: next(given) for key in own}
        for key in keys:
            base.__setitem__(instance, key, entries[key] if key in entries else getattr(instance, key))
        return instance

    _register(cls, to_children, from_children, path_entry_type=optree.GetAttrEntry)
    return True


def _register(cls: Any, *functions: Any, **options: Any) -> None:
    """Teach optree a class, once; without a lock, for which a handler of signals might wait in vain."""
    if cls not in _registered:
        with contextlib.suppress(ValueError):  # somebody has meanwhile
            optree.register_pytree_node(cls, *functions, **options, namespace=NAMESPACE)
        _registered.add(cls)


def _static_key(leaf: Any) -> tuple[type, Any]:
    """Return a key under which two static leaves are interchangeable (1, 1.0 and True are not; nor 0.0 and -0.0)."""
    if isinstance(leaf, tuple):  # such as a shape, where its class is a subclass that optree takes for a leaf
        return type(leaf), tuple(map(_static_key, leaf))
    if isinstance(leaf, (slice, range)):
        return type(leaf), tuple(map(_static_key, (leaf.start, leaf.stop, leaf.step)))
    if type(leaf) is frozenset:
        return frozenset, frozenset(map(_static_key, leaf))
    if isinstance(leaf, (float, complex)):
        return type(leaf), repr(leaf)
    if isinstance(leaf, (int, str, bytes, type(None))):
        return type(leaf), leaf
    return type(leaf), id(leaf)  # the relay that is cached under this key keeps the object, hence the id, alive


ONE = Structure(flatten(0)[1], [None], (0,), _only)
