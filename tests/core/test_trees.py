"""Asks what is a leaf, where it is, and which calls can share a relay."""

import copy
import dataclasses
import math
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import toy

import polybridge
from polybridge.core import trees
from polybridge.core.exchange import Exchange
from polybridge.core.trees import Kind, Structure
from polybridge.core.wrapping import _Wrapped, classifier

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    name: str = "frozen"


@dataclasses.dataclass
class Counted:
    x: object
    made: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.made.append("again")


@dataclasses.dataclass(slots=True)
class Slotted:
    x: object


@dataclasses.dataclass
class Empty:
    pass


@dataclasses.dataclass
class Measured:
    x: object
    later: object = dataclasses.field(init=False)

    def __post_init__(self):
        self.half = [self.x]


@dataclasses.dataclass
class Output(OrderedDict):
    """As a model of Hugging Face returns it: a field that is not None is an entry too."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


@dataclasses.dataclass(frozen=True, eq=False)
class Hashed:
    x: object


class Config(dict):
    pass


class Batch(list):
    pass


@dataclasses.dataclass
class Named(list):
    name: str = "named"


@pytest.fixture
def seen():
    """Return `call(*args)`, which sends arguments through a wrapped function and returns what reached it."""

    def call(*args, **kwargs):
        caught = []

        def fn(*args, **kwargs):
            caught.append((args, kwargs))
            return toy.array(0.0)

        source = dest = polybridge.get_backend("toy")
        _Wrapped(fn, Exchange(dest, source), None).function()(*args, **kwargs)
        return caught[0]

    return call


def structure(*args, **kwargs) -> Structure:
    """Return the structure of a call, in which the arrays of toy are the dynamic leaves."""
    leaves, treedef = trees.flatten((args, kwargs))
    dynamic = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, toy.Array))
    return Structure(treedef, [None if i in dynamic else leaf for i, leaf in enumerate(leaves)], dynamic)


X = toy.array(1.0)


@pytest.mark.parametrize(
    "tree",
    [
        [X, X],
        (X, [X, (X,)]),
        {"b": X, "a": X},
        OrderedDict(b=X, a=X),
        defaultdict(list, a=X),
        Point(X, X),
        Frozen(X),
        Slotted(X),
        {"deep": [Frozen((X, None)), Point(x={1: X}, y=())]},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_container_is_rebuilt_as_it_was(tree):
    leaves, treedef = trees.flatten(tree)
    assert treedef.unflatten(leaves) == tree
    assert type(treedef.unflatten(leaves)) is type(tree)


def test_a_dict_keeps_the_order_of_its_keys():
    leaves, treedef = trees.flatten({"b": 1, "a": 2})
    assert list(treedef.unflatten(leaves)) == ["b", "a"]


def test_a_dict_may_have_keys_that_cannot_be_compared():
    leaves, treedef = trees.flatten({"b": 1, 2: 3, None: 4})
    assert treedef.unflatten(leaves) == {"b": 1, 2: 3, None: 4}


def test_none_is_a_leaf():
    assert trees.flatten([None, (None, 1)])[0] == [None, None, 1]


def test_an_empty_container_has_no_leaves():
    assert trees.flatten([(), {}, Empty()])[0] == []


def test_a_dataclass_is_rebuilt_without_running_its_constructor_again():
    counted = Counted(X)
    leaves, treedef = trees.flatten(counted)
    assert treedef.unflatten(leaves).made == ["again"]


def test_a_dataclass_keeps_attributes_that_are_no_fields():
    leaves, treedef = trees.flatten(Measured(1))
    rebuilt = treedef.unflatten([leaf + 1 for leaf in leaves])
    assert (rebuilt.x, rebuilt.half) == (2, [2])
    assert not hasattr(rebuilt, "later")


def test_a_dataclass_that_is_a_dict_keeps_its_entries():
    output = Output(logits=1)
    output["more"] = 5
    leaves, treedef = trees.flatten(output)
    rebuilt = treedef.unflatten([leaf and leaf + 1 for leaf in leaves])
    assert leaves == [None, 1, 5]
    assert (rebuilt.loss, rebuilt.logits, list(rebuilt.items())) == (None, 2, [("logits", 2), ("more", 6)])


def test_a_dataclass_itself_is_not_a_container():
    assert trees.flatten([Frozen])[0] == [Frozen]


def test_a_dataclass_may_meet_two_threads_at_once():
    """Both threads find it unknown, and both teach it to optree."""
    fresh = dataclasses.make_dataclass("Fresh", ["x"])
    assert trees._register_dataclass(fresh(1))
    assert trees._register_dataclass(fresh(1))
    assert trees.flatten(fresh(1))[0] == [1]


def test_static_values_reach_the_function_unchanged(seen):
    marker = object()
    args, kwargs = seen(X, 1, "text", None, marker, flag=True, scale=2.5)
    assert args[1:] == (1, "text", None, marker)
    assert kwargs == {"flag": True, "scale": 2.5}


def test_tensors_inside_containers_reach_the_function(seen):
    (args, kwargs) = seen([X, {"w": X}], point=Point(X, "name"))
    assert args[0][1]["w"].value == 1.0
    assert kwargs["point"].y == "name"


HIDING = {
    "dict": lambda x: Config(a=x),
    "list": lambda x: Batch([0, x]),
    "dataclass": lambda x: copy.copy(Named()).__iadd__([x]),
    "deep": lambda x: Config(a=[Batch([{"b": x}])]),
    "user_dict": lambda x: UserDict(a=x),
    "chain_map": lambda x: ChainMap({}, {"a": x}),
    "proxy": lambda x: types.MappingProxyType({"a": x}),
    "set": lambda x: {(Hashed(x),)},
    "values": lambda x: {"a": x}.values(),
    "items": lambda x: {"a": x}.items(),
    "generator": lambda x: (i for i in [x]),
    "map": lambda x: map(abs, [x]),
    "zip": lambda x: zip([x], [x], strict=True),
}


@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_a_tensor_where_nobody_looks_is_refused(hide):
    """It would reach the other side as it is: a tensor of a framework that is not expected there."""
    x = toy.array(1.0)
    f = polybridge.wrap(lambda _: None, src="numpy", dst="toy")
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[0\] cannot cross .* nor a list, tuple, dict"):
        f(hide(x))
    g = polybridge.wrap(lambda _: hide(x), src="toy", dst="numpy")
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result cannot cross .* nor a list, tuple, dict"):
        g(0)
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"tree\[0\] cannot cross .* nor a list, tuple, dict"):
        polybridge.convert([hide(x)], "numpy")


def test_what_an_asynchronous_function_returns_is_refused():
    async def asynchronous():
        return X

    coroutine = asynchronous()
    with pytest.raises(polybridge.UnsupportedTensorError, match="a coroutine is not"):
        polybridge.wrap(lambda: coroutine, src="toy", dst="numpy")()
    coroutine.close()


@pytest.mark.parametrize("static", [Config(a=1), Batch([2, "b"]), UserDict(a=None), {1, 2}, Named(), {}.keys()])
def test_a_container_of_other_values_reaches_the_function_unchanged(seen, static):
    for _ in range(2):
        assert seen(X, static)[0][1] is static


def test_a_container_that_held_no_tensor_is_asked_again():
    f = polybridge.wrap(lambda _: None, src="numpy", dst="toy")
    f(Config(a=1))
    with pytest.raises(polybridge.UnsupportedTensorError, match="a Config is not"):
        f(Config(a=X))


@pytest.mark.parametrize("static", [1, 1.0, True, 0.0, -0.0, math.inf, math.nan, 1j, "1", b"1", None, (), X.shape])
def test_equal_static_values_share_a_relay(static):
    assert structure(X, static).key() == structure(X, static).key()
    assert hash(structure(X, static).key()) == hash(structure(X, static).key())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (1.0, 1 + 0j),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (math.nan, math.inf),
        ("1", b"1"),
        ("1", 1),
        (None, 0),
        (None, ()),
        ([], ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_static_values_do_not_share_a_relay(one, other):
    assert structure(X, one).key() != structure(X, other).key()


def test_two_objects_do_not_share_a_relay_even_if_they_are_equal():
    """A mutable object that equals another may not equal it later."""
    assert structure(X, {1}).key() != structure(X, {1}).key()


def test_an_object_shares_a_relay_with_itself():
    static = object()
    assert structure(X, static).key() == structure(X, static).key()


def test_a_keyword_does_not_share_a_relay_with_a_position():
    assert structure(X).key() != structure(x=X).key()


def test_names_in_a_dict_tell_relays_apart():
    assert structure({"a": X}).key() != structure({"b": X}).key()


def test_dicts_of_another_order_do_not_share_a_relay():
    """The function may go through them in order."""
    assert structure({"a": X, "b": X}).key() != structure({"b": X, "a": X}).key()
    assert structure(a=X, b=X).key() != structure(b=X, a=X).key()


def test_calls_without_static_values_share_a_relay():
    assert structure(X, [X]).key() == structure(X, [X]).key()


def test_a_tensor_does_not_share_a_relay_with_none():
    assert structure(X).key() != structure(None).key()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (((X,), {}), "args[0]"),
        (((1, [2, X]), {}), "args[1][1]"),
        ((({"weights": X},), {}), "args[0]['weights']"),
        (((Point(1, X),), {}), "args[0].y"),
        (((Frozen(X),), {}), "args[0].x"),
        (((), {"scale": X}), "kwargs['scale']"),
        (((), {"config": [Frozen({"a": X})]}), "kwargs['config'][0].x['a']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_is_named_as_python_reaches_it(arguments, expected):
    assert structure(*arguments[0], **arguments[1]).argument(0) == expected


def test_a_result_is_named_from_its_root():
    _, treedef = trees.flatten({"loss": X, "parts": [X, X]})
    assert trees.path(treedef, 2, "result") == "result['parts'][1]"


def test_the_root_itself_has_a_name():
    assert trees.path(trees.flatten(X)[1], 0, "result") == "result"


def classify(leaf: object) -> Kind:
    """Return what a leaf is to a backend of `int` tensors, to which tuples are composite and sets foreign."""
    asked = trees.Classifier(
        lambda x: type(x) is frozenset, lambda x: isinstance(x, range), lambda x: isinstance(x, set), lambda x: False
    )
    return asked(leaf)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (frozenset(), Kind.TENSOR),
        (np.zeros(2), Kind.ARRAY),
        (np.float32(1), Kind.ARRAY),
        (np.bool_(True), Kind.ARRAY),
        (range(2), Kind.COMPOSITE),
        (set(), Kind.FOREIGN),
        (object(), Kind.STATIC),
        (1, Kind.STATIC),
        (True, Kind.STATIC),
        ("text", Kind.STATIC),
        (None, Kind.STATIC),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_is_classified_by_its_type(leaf, kind):
    assert classify(leaf) is kind


def test_a_type_is_asked_about_once():
    asked = []
    classify = trees.Classifier(lambda x: bool(asked.append(x)), lambda x: False, lambda x: False, lambda x: False)
    classify(range(1))
    classify(range(2))
    assert asked == [range(1)]


def test_what_a_tree_is_depends_on_what_is_in_it():
    classify = trees.Classifier(lambda x: False, lambda x: len(x) > 0, lambda x: False, lambda x: True)
    assert [classify(range(n)) for n in (0, 1, 0)] == [Kind.STATIC, Kind.COMPOSITE, Kind.STATIC]


# Tensors alone, which no tree is walked for.


def toys(count):
    """Return tensors, and the structure of them as positional arguments with and without a walk."""
    classify = classifier(polybridge.get_backend("toy"))
    args = tuple(toy.array(float(i)) for i in range(count))
    _, walked = trees.separate((args, {}), classify, None)
    tensors, structure = trees.separate_arguments(args, {}, classify, None)
    assert tuple(tensors) == args
    return args, structure, walked


@pytest.mark.parametrize("count", [0, 1, 3])
def test_positional_tensors_have_the_structure_that_a_walk_finds(count):
    args, structure, walked = toys(count)
    assert structure.key() == walked.key() and structure.dynamic == walked.dynamic
    assert structure.rebuild(list(args)) == walked.rebuild(list(args)) == (args, {})


def test_positional_tensors_are_named_by_their_path():
    _, structure, _ = toys(3)
    assert structure.argument(2) == "args[2]"


def test_a_tensor_alone_has_the_structure_of_a_leaf(monkeypatch):
    monkeypatch.setattr(trees.optree, "tree_flatten", None)
    x = toy.array(1.0)
    tensors, structure = trees.separate_result(x, classifier(polybridge.get_backend("toy")), None)
    assert tensors == [x] and structure.rebuild([x]) is x and structure.result(0) == "result"


def test_the_second_call_on_tensors_walks_no_tree(monkeypatch):
    source = polybridge.get_backend("toy")
    function = _Wrapped(lambda x, y: x, Exchange(source, source), None).function()
    x = toy.array(1.0)
    function(x, x)
    monkeypatch.setattr(trees, "optree", None)
    function(x, x)


# Trees like one that is known.


def kind_of(leaf):
    return Kind.TENSOR if isinstance(leaf, toy.Array) else Kind.STATIC


def structure_of(*args, **kwargs):
    """Return the structure of a call."""
    return trees.separate((args, kwargs), kind_of, None)[1]


A = toy.array(1.0)


def test_a_tree_is_filled_with_other_values_and_none_elsewhere():
    assert structure_of({"a": A, "b": 3}, [A], n=A).like([1, 2, 3]) == (({"a": 1, "b": None}, [2]), {"n": 3})


def test_a_like_tree_gives_its_values_back():
    assert structure_of({"a": A, "b": 3}, [A], n=A).unlike((({"b": 0, "a": 1}, [2]), {"n": 3})) == [1, 2, 3]


def test_none_stands_for_none_in_every_leaf():
    structure = structure_of({"a": A, "b": [A, A]}, A, n=A)
    assert structure.unlike((({"a": 1, "b": None}, 2), None)) == [1, None, None, 2, None]


@pytest.mark.parametrize("tree", [(([1],), {}), (((1,), 2), {}), ({"a": 1}, {}), (({"a": 1, "b": 2},), {})])
def test_an_unlike_tree_is_refused(tree):
    with pytest.raises(ValueError):
        structure_of({"a": A}).unlike(tree)


def test_the_arity_counts_positional_arguments_and_looks_for_tensors_in_the_others():
    assert structure_of([A, A], 3, n=4).arity() == (2, False)
    assert structure_of(A, n=[4, A]).arity() == (1, True)
    assert structure_of().arity() == (0, False)


def test_a_bare_tensor_is_told_from_a_tree():
    found = [trees.separate(tree, kind_of, None)[1].is_tensor for tree in (A, [A], 3, None)]
    assert found == [True, False, False, False]
