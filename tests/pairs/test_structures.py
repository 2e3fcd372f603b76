"""Asks that any tree of arguments and results goes through, with its types, its gradients and its static leaves."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any
    name: str = "layer"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    factor: float = 2.0


@dataclasses.dataclass
class Checked:
    value: Any
    count: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.count += 1


@dataclasses.dataclass
class Scaled:
    value: Any

    def __post_init__(self):
        self.unscaled = self.value  # no field


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As what models of Hugging Face return."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})


TREES = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": b},
    "dict_of_other_keys": lambda a, b: {1: a, (2, "x"): b},
    "nested": lambda a, b: {"outer": [{"inner": (a,)}, [[b]]]},
    "named_tuple": lambda a, b: Point(a, b),
    "named_tuple_in_dict": lambda a, b: {"p": Point(x=[a], y=b)},
    "ordered_dict": lambda a, b: collections.OrderedDict(z=a, a=b),
    "default_dict": lambda a, b: collections.defaultdict(list, {"a": a, "b": b}),
    "deque": lambda a, b: collections.deque([a, b]),
    "dataclass": lambda a, b: Layer(a, b, name="first"),
    "frozen_dataclass": lambda a, b: Frozen(a, Frozen(b)),
    "slotted_dataclass": lambda a, b: [Slotted(a), Slotted(b, 3.0)],
    "dataclass_with_field_outside_init": lambda a, b: (Checked(a), Checked(b)),
    "dataclass_with_another_attribute": lambda a, b: [Scaled(a), Scaled(b)],
    "dataclass_that_is_a_dict": lambda a, b: Output(logits=a, states=(b,)),
    "with_empty_containers": lambda a, b: ([], {}, (), a, None, b),
    "with_static_leaves": lambda a, b: {"a": a, "n": 3, "s": "text", "f": 1.5, "t": (True, None), "b": b},
}


def leaves(tree, is_tensor):
    """Return the tensors of a tree, found without polybridge's own flattening."""
    if is_tensor(tree):
        return [tree]
    if dataclasses.is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    elif isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple, collections.deque)):
        return [x for item in tree for x in leaves(item, is_tensor)]
    return []


def skeleton(tree, is_tensor):
    """Return the tree with its types written out and a mark for each tensor."""
    if is_tensor(tree):
        return "tensor"
    if dataclasses.is_dataclass(tree):
        return type(tree), {f.name: skeleton(getattr(tree, f.name), is_tensor) for f in dataclasses.fields(tree)}
    if isinstance(tree, dict):
        return type(tree), [(key, skeleton(value, is_tensor)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple, collections.deque)):
        return type(tree), [skeleton(item, is_tensor) for item in tree]
    return type(tree), tree


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_gradients_reach_every_leaf_of_an_argument(pair, src, dst, make):
    """Case 28."""

    def product(tree):
        a, b = leaves(tree, src.is_tensor)
        return a * b

    wrapped = pair.wrap(product)
    a, b = dst.tensor([2.0]), dst.tensor([3.0])
    assert dst.gradient(lambda a, b: wrapped(make(a, b)), a, b) == [[3.0], [2.0]]


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_gradients_come_from_every_leaf_of_a_result(pair, src, dst, make):
    wrapped = pair.wrap(lambda x: make(x * 2, x * 5))

    def total(x):
        first, second = leaves(wrapped(x), dst.is_tensor)
        return first * 10 + second

    assert dst.gradient(total, dst.tensor([1.0])) == [25.0]


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_the_function_gets_the_types_of_the_caller(pair, src, dst, make):
    seen = []
    given = make(dst.tensor([1.0]), dst.tensor([2.0]))
    pair.wrap(lambda tree: seen.append(skeleton(tree, src.is_tensor)))(given)
    assert seen == [skeleton(given, dst.is_tensor)]


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_the_caller_gets_the_types_of_the_function(pair, src, dst, make):
    found = pair.wrap(lambda x: make(x * 2, x * 3))(dst.tensor([1.0]))
    assert skeleton(found, dst.is_tensor) == skeleton(make(src.tensor([2.0]), src.tensor([3.0])), src.is_tensor)


def test_the_tree_of_the_caller_is_left_alone(pair, src, dst):
    a = dst.tensor([1.0])
    tree = {"a": a, "list": [a, 2]}
    pair.wrap(lambda tree: tree["list"].append(tree.pop("a")))(tree)
    assert tree["a"] is a and len(tree["list"]) == 2


# Arguments.


def test_keyword_arguments_are_differentiable(pair, dst):
    """Case 29."""
    wrapped = pair.wrap(lambda x, *, scale, flag=True, axis=-1: x * scale if flag and axis == -1 else x)
    x, scale = dst.tensor([2.0]), dst.tensor([3.0])
    found = dst.gradient(lambda x, s: wrapped(x, scale=s, flag=True, axis=-1), x, scale)
    assert found == [[3.0], [2.0]]


def test_defaults_are_the_functions_own(pair, src, dst):
    constant = src.tensor([4.0])

    def fn(x, scale=constant, power=2):
        return x**power * scale

    assert dst.numpy(pair.wrap(fn)(dst.tensor([3.0]))) == [36.0]


def test_a_tensor_may_be_passed_by_position_or_by_name(pair, dst):
    wrapped = pair.wrap(lambda a, b: a - b)
    a, b = dst.tensor([5.0]), dst.tensor([3.0])
    assert [float(dst.numpy(y)[0]) for y in (wrapped(a, b), wrapped(a, b=b), wrapped(b=b, a=a))] == [2.0, 2.0, 2.0]


def test_variadic_arguments_go_through(pair, dst):
    wrapped = pair.wrap(lambda *xs, **named: sum(xs) + sum(named.values()))
    assert dst.numpy(wrapped(*[dst.tensor([1.0])] * 3, extra=dst.tensor([4.0]))) == [7.0]


STATIC = [None, True, 3, 2.5, 1 + 2j, "text", b"bytes", len, range(3), {1, 2}, object(), slice(1), ...]


@pytest.mark.parametrize("static", STATIC, ids=lambda static: type(static).__name__)
def test_what_is_no_tensor_reaches_the_function_unchanged(pair, dst, static):
    seen = []
    pair.wrap(lambda x, rest, named: seen.extend([*rest, named]))(dst.tensor([1.0]), [static], named=static)
    assert seen[0] is static and seen[1] is static


def test_static_values_that_are_equal_but_differ_are_told_apart(pair, dst):
    wrapped = pair.wrap(lambda x, static: seen.append(static))
    seen = []
    for static in (1, True, 1.0, 0.0, -0.0, "1", b"1"):
        wrapped(dst.tensor([1.0]), static)
    assert [repr(x) for x in seen] == ["1", "True", "1.0", "0.0", "-0.0", "'1'", "b'1'"]


def test_a_static_object_that_changes_is_seen_as_it_is(pair, src, dst):
    """A function that is traced sees it as it was, as natively."""

    class Settings:
        factor = 2.0

    wrapped, settings, x = pair.wrap(lambda x, s: x * s.factor), Settings(), dst.tensor([1.0])
    first = dst.numpy(wrapped(x, settings))
    settings.factor = 3.0
    assert (first, dst.numpy(wrapped(x, settings))) == ([2.0], [2.0 if src.traces else 3.0])


def test_a_closure_that_changes_is_seen_as_it_is(pair, src, dst):
    """As above."""
    factor = 2.0
    wrapped, x = pair.wrap(lambda x: x * factor), dst.tensor([1.0])
    wrapped(x)
    factor = 3.0
    assert dst.numpy(wrapped(x)) == [2.0 if src.traces else 3.0]


def test_a_call_without_arguments(pair, src, dst):
    assert dst.numpy(pair.wrap(lambda: src.tensor([1.0, 2.0]))()).tolist() == [1.0, 2.0]


def test_a_call_without_tensors(pair, src, dst):
    assert dst.numpy(pair.wrap(lambda n: src.tensor([1.0] * n))(3)).tolist() == [1.0] * 3


# Numbers of another kind among the floats.


def test_integer_inputs_get_no_gradient(pair, src, dst):
    """Case 32."""
    wrapped = pair.wrap(src.take)
    weights, indices = dst.tensor([1.0, 2.0, 3.0]), dst.tensor(np.array([0, 2, 2]))
    assert [g if g is None else g.tolist() for g in dst.gradient(wrapped, weights, indices)] == [[1.0, 0.0, 2.0], None]


@pytest.mark.filterwarnings("error")
def test_integer_inputs_and_outputs_raise_no_warning(pair, src, dst):
    wrapped = pair.wrap(lambda w, i: (src.take(w, i), i, i > 1))
    dst.gradient(lambda w, i: wrapped(w, i)[0], dst.tensor([1.0, 2.0, 3.0]), dst.tensor(np.array([0, 2, 2])))


def test_integer_outputs_come_beside_differentiable_ones(pair, src, dst):
    """Case 33."""
    wrapped = pair.wrap(lambda x: (src.argmax(x), x * 2, x > 1))
    x = dst.tensor([1.0, 3.0, 2.0])
    assert dst.gradient(lambda x: wrapped(x)[1], x).tolist() == [2.0] * 3
    position, _, mask = wrapped(x)
    assert int(dst.numpy(position)) == 1 and dst.numpy(mask).tolist() == [False, True, True]


def test_integer_outputs_are_not_differentiable_in_torch():
    wrapped = polybridge.wrap(lambda x: (tf.argmax(x), x * 2), src="tf", dst="torch")
    position, doubled = wrapped(torch.tensor([1.0, 3.0], requires_grad=True))
    assert not position.requires_grad and doubled.requires_grad


def test_integer_outputs_have_no_gradient_in_tensorflow():
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        position, doubled = polybridge.wrap(lambda x: (x.argmax(), x * 2), src="torch", dst="tf")(x)
        as_float = tf.cast(position, tf.float32) + 0 * tf.reduce_sum(doubled)
    assert tape.gradient(as_float, x).numpy().tolist() == [0.0, 0.0]


def test_only_integers_in_and_out(pair, src, dst):
    wrapped = pair.wrap(lambda n: n * 2)
    assert dst.numpy(wrapped(dst.tensor(np.array([1, 2])))).tolist() == [2, 4]


# Which inputs have an influence.


def test_unused_input_follows_the_callers_convention_in_torch():
    """Case 31."""
    wrapped = polybridge.wrap(lambda a, b: a * 2, src="tf", dst="torch")
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(wrapped(a, b).sum(), [a, b], allow_unused=True)[1] is None
    wrapped(a, b).sum().backward()
    assert b.grad is None and a.grad.tolist() == [2.0, 2.0]


def test_unused_input_is_zero_in_torch_where_zeros_are_asked():
    wrapped = polybridge.wrap(lambda a, b: a * 2, src="tf", dst="torch")
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(wrapped(a, b).sum(), [a, b], materialize_grads=True)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("unconnected, expected", [("none", None), ("zero", [0.0, 0.0])])
def test_unused_input_follows_the_callers_convention_in_tensorflow(unconnected, expected):
    """Case 31."""
    a, b = tf.ones(2), tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch([a, b])
        y = polybridge.wrap(lambda a, b: a * 2, src="torch", dst="tf")(a, b)
    found = tape.gradient(y, [a, b], unconnected_gradients=unconnected)
    assert found[0].numpy().tolist() == [2.0, 2.0]
    assert (found[1] if found[1] is None else found[1].numpy().tolist()) == expected


def test_an_output_that_is_not_used_does_not_count(pair, dst):
    wrapped = pair.wrap(lambda a, b: (a * 2, b * 3))
    a, b = dst.tensor([1.0]), dst.tensor([1.0])
    first, second = dst.gradient(lambda a, b: wrapped(a, b)[0], a, b)
    assert first == [2.0] and second in (None, [0.0])


def test_an_output_that_no_input_influences(pair, src, dst):
    wrapped = pair.wrap(lambda x: (x * 2, src.tensor([5.0])))
    assert dst.gradient(lambda x: wrapped(x)[0] + wrapped(x)[1], dst.tensor([1.0])) == [2.0]


def test_a_stopped_gradient_stays_stopped(pair, src, dst):
    wrapped = pair.wrap(lambda x: x * src.stop_gradient(x))
    assert dst.gradient(wrapped, dst.tensor([3.0])) == [3.0]


def test_the_same_tensor_twice_gets_both_gradients(pair, dst):
    wrapped = pair.wrap(lambda a, b: a * a * b)
    assert dst.gradient(lambda x: wrapped(x, x), dst.tensor([2.0])) == [12.0]


def test_the_same_tensor_twice_in_a_tree_gets_both_gradients(pair, dst):
    wrapped = pair.wrap(lambda tree: tree["a"] * tree["b"][0])
    assert dst.gradient(lambda x: wrapped({"a": x, "b": [x]}), dst.tensor([2.0])) == [4.0]


def test_the_same_tensor_twice_in_a_result_gets_both_gradients(pair, dst):
    def twice(x):
        y = x * 3
        return y, y

    wrapped = pair.wrap(twice)
    assert dst.gradient(lambda x: wrapped(x)[0] + 2 * wrapped(x)[1], dst.tensor([2.0])) == [9.0]


def test_an_output_that_is_the_input_passes_the_gradient(pair, src, dst):
    wrapped = pair.wrap(lambda x: (x, x * 2))
    assert dst.gradient(lambda x: wrapped(x)[0] * 5 + wrapped(x)[1], dst.tensor([1.0])) == [7.0]


def test_an_output_that_is_a_view_of_the_input_passes_the_gradient(pair, src, dst):
    wrapped = pair.wrap(lambda x: src.reshape(x, (3, 2))[1])
    assert dst.gradient(wrapped, dst.tensor([1.0] * 6)).tolist() == [0, 0, 1, 1, 0, 0]


# Results that are no tensors.


def test_none_among_tensors_stays_none(pair, src, dst):
    found = pair.wrap(lambda x: (x * 2, None, [None, x]))(dst.tensor([1.0]))
    assert found[1] is None and found[2][0] is None and dst.is_tensor(found[2][1])


def test_python_values_among_tensors_stay_what_they_are(pair, dst):
    wrapped = pair.wrap(lambda x: {"y": x * 2, "n": 3, "name": "text", "pi": 3.14})
    found = wrapped(dst.tensor([1.0]))
    assert (found["n"], found["name"], found["pi"]) == (3, "text", 3.14)
    assert dst.gradient(lambda x: wrapped(x)["y"], dst.tensor([1.0])) == [2.0]


def test_a_function_may_return_none(pair, dst):
    assert pair.wrap(lambda x: None)(dst.tensor([1.0])) is None


def test_a_function_may_return_a_python_value(pair, dst):
    assert pair.wrap(lambda x: len(x.shape))(dst.tensor([1.0])) == 1


def test_numpy_arrays_in_a_result_become_tensors(pair, dst):
    found = pair.wrap(lambda x: (x * 2, np.array([1.0, 2.0]), np.float32(3)))(dst.tensor([1.0]))
    assert [dst.numpy(y).tolist() for y in found] == [[2.0], [1.0, 2.0], 3.0]


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
def test_the_structure_of_the_result_may_change_from_call_to_call(pair, dst):
    wrapped = pair.wrap(lambda x: {"x": x} if float(x[0]) > 0 else [x, x])
    assert isinstance(wrapped(dst.tensor([1.0])), dict)
    assert len(wrapped(dst.tensor([-1.0]))) == 2


# NumPy arrays and trainable things as arguments.


def test_numpy_arrays_are_constants(pair, dst):
    wrapped = pair.wrap(lambda x, a: x * a["scale"])
    array = np.array([4.0], "float32")
    assert dst.gradient(lambda x: wrapped(x, {"scale": array}), dst.tensor([1.0])) == [4.0]


def test_numpy_arrays_alone_give_tensors_of_the_caller(pair, src, dst):
    found = pair.wrap(src.sin)(np.array([0.0, 1.0]))
    assert dst.is_tensor(found) and dst.dtype(found) == "float64"


def test_a_parameter_gets_its_gradient(pair, dst):
    weight, x = dst.parameter([2.0, 3.0]), dst.tensor([5.0, 7.0])
    wrapped = pair.wrap(lambda weights, x: weights["w"] * x)
    found, _ = dst.gradient(lambda w, x: wrapped({"w": w}, x), weight, x)
    assert found.tolist() == [5.0, 7.0]


def test_a_torch_parameter_accumulates_its_gradient():
    module = torch.nn.Linear(3, 2)
    wrapped = polybridge.wrap(lambda w, b, x: tf.linalg.matvec(w, x) + b, src="tf", dst="torch")
    for _ in range(2):
        wrapped(module.weight, module.bias, torch.ones(3)).sum().backward()
    assert module.weight.grad.tolist() == [[2.0] * 3] * 2 and module.bias.grad.tolist() == [2.0, 2.0]


def test_an_untouched_tape_follows_trainable_variables():
    variable = tf.Variable([2.0, 3.0])
    with tf.GradientTape() as tape:
        y = polybridge.wrap(lambda v: v * v, src="torch", dst="tf")(variable)
    assert tape.gradient(y, variable).numpy().tolist() == [4.0, 6.0]


def test_a_variable_that_is_not_trainable_gets_no_gradient():
    variable = tf.Variable([2.0], trainable=False)
    with tf.GradientTape() as tape:
        y = polybridge.wrap(lambda v: v * v, src="torch", dst="tf")(variable)
    assert tape.gradient(y, variable) is None


def test_a_keras_variable_gets_its_gradient():
    variable = keras.Variable([2.0, 3.0])
    with tf.GradientTape() as tape:
        y = polybridge.wrap(lambda v: v * v, src="torch", dst="tf")(variable)
    assert tape.gradient(y, variable.value).numpy().tolist() == [4.0, 6.0]


def test_weights_of_a_keras_layer_get_their_gradients():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    with tf.GradientTape() as tape:
        dense = polybridge.wrap(lambda weights, x: x @ weights[0] + weights[1], src="torch", dst="tf")
        y = dense(layer.trainable_variables, tf.ones((1, 3)))
    kernel, bias = tape.gradient(y, [v.value for v in layer.trainable_variables])
    assert kernel.numpy().tolist() == [[1.0, 1.0]] * 3 and bias.numpy().tolist() == [1.0, 1.0]


# What can be wrapped.


def test_a_partial_a_method_and_a_callable_object_can_be_wrapped(pair, dst):
    class Scale:
        factor = 3.0

        def __call__(self, x):
            return x * self.factor

        def method(self, x):
            return x * self.factor * 2

    fns = [functools.partial(lambda f, x: x * f, 2.0), Scale(), Scale().method]
    assert [float(dst.numpy(pair.wrap(fn)(dst.tensor([1.0])))[0]) for fn in fns] == [2.0, 3.0, 6.0]


def test_wrap_is_a_decorator(pair, src, dst):
    @polybridge.wrap(src=src.name, dst=dst.name)
    def double(x):
        """Double it."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Double it.")
    assert dst.numpy(double(dst.tensor([1.0]))) == [2.0]


def test_a_function_of_the_same_framework_is_returned_as_it_is(src):
    assert polybridge.wrap(src.sin, src=src.name, dst=src.name) is src.sin
