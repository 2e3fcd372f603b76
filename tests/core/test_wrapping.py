"""Asks `wrap` and `convert`: what they refuse, what they keep of a function, and what reaches it."""

import functools
import inspect
import threading

import numpy as np
import pytest
import toy

import polybridge
from tests.core.fakes import FakeBackend, register


@pytest.fixture
def fake(monkeypatch):
    """A second framework, known to polybridge as "fake", whose functions take and give tensors of two numbers."""
    return register(monkeypatch, FakeBackend("fake"))


@pytest.fixture
def x(fake):
    return fake.full(3.0)


def double(x):
    """Return twice the input."""
    return x + x


# What is refused.


@pytest.mark.parametrize("wrong", [3, "function", [double]], ids=lambda value: type(value).__name__)
def test_what_cannot_be_called_is_refused(wrong):
    with pytest.raises(polybridge.NotCallableError, match=rf"`polybridge.wrap`.*{type(wrong).__name__}"):
        polybridge.wrap(wrong, src="toy", dst="torch")


@pytest.mark.parametrize("role", ["src", "dst"])
def test_an_unknown_framework_is_refused(role):
    with pytest.raises(polybridge.UnknownBackendError, match="'troch'"):
        polybridge.wrap(double, **{"src": "toy", "dst": "toy", role: "troch"})


@pytest.mark.parametrize("copy", ["never", None, 2, 1, 0, "True"], ids=lambda value: type(value).__name__)
def test_a_bad_copy_policy_is_refused(fake, copy):
    with pytest.raises(ValueError, match=r'copy="auto", True or False, got '):
        polybridge.wrap(double, src="toy", dst="fake", copy=copy)


def test_a_bad_copy_policy_is_refused_even_where_nothing_crosses():
    with pytest.raises(ValueError, match="copy="):
        polybridge.wrap(double, src="toy", dst="toy", copy="never")


def test_frameworks_are_named_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        polybridge.wrap(double, "toy", "toy")


@pytest.mark.parametrize("missing", ["src", "dst"])
def test_both_frameworks_have_to_be_named(missing):
    given = {"src": "toy", "dst": "toy"}
    del given[missing]
    with pytest.raises(TypeError, match=missing):
        polybridge.wrap(double, **given)


def test_a_tensor_of_another_framework_is_refused_with_its_path(fake, two):
    f = polybridge.wrap(double, src="toy", dst="fake")
    message = r"`double \(src='toy', dst='fake'\)` takes fake tensors, but args\[0\]\['w'\] is a toy\.Array"
    with pytest.raises(polybridge.WrongFrameworkError, match=message):
        f({"w": two})


def test_a_tensor_of_nobody_is_refused_too(fake):
    stranger = type("Stranger", (), {"__dlpack__": None})()
    with pytest.raises(polybridge.WrongFrameworkError, match="Stranger"):
        polybridge.wrap(double, src="toy", dst="fake")(stranger)


def test_a_composite_argument_is_refused_with_its_path(fake, x):
    fake.is_composite = lambda value: isinstance(value, range)
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"kwargs\['index'\].*a range is not a dense tensor"):
        polybridge.wrap(double, src="toy", dst="fake")(x, index=range(3))


def test_an_argument_without_a_dense_form_is_refused_with_its_path(fake, x):
    def dense(tensor):
        if tensor is not x:
            raise polybridge.UnsupportedTensorError("a tensor of dtype string")
        return tensor

    fake.dense = dense
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[1\] cannot cross.*dtype string"):
        polybridge.wrap(lambda x, y: x, src="toy", dst="fake")(x, fake.full(1.0))


def test_a_result_of_another_framework_is_refused_with_its_path(fake, x):
    with pytest.raises(polybridge.OutputError, match=r"wraps a toy function.*fake\.Tensor at result\['y'\]"):
        polybridge.wrap(lambda x: {"y": fake.full(1.0)}, src="toy", dst="fake")(x)


def test_a_result_without_a_spec_is_refused_with_its_path(fake, two):
    def spec(tensor):
        raise polybridge.UnsupportedTensorError("a tensor of dtype string")

    fake.spec = spec
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\[0\] cannot cross"):
        polybridge.wrap(lambda x: [x], src="fake", dst="toy")(two)


def test_a_numpy_array_of_objects_is_refused_with_its_path(fake, x):
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"args\[1\].*NumPy dtype object"):
        polybridge.wrap(double, src="toy", dst="fake")(x, np.array([None]))


# What is kept.


def test_the_same_framework_gives_the_function_itself():
    assert polybridge.wrap(double, src="toy", dst="toy") is double


def test_without_a_function_wrap_is_a_decorator(fake, x):
    @polybridge.wrap(src="toy", dst="fake")
    def triple(x):
        return 3 * x

    assert triple(x).value.tolist() == [9.0, 9.0]


def test_the_decorator_takes_every_option(fake):
    decorate = polybridge.wrap(src="toy", dst="fake", copy="never")
    with pytest.raises(ValueError, match="copy="):
        decorate(double)


def test_a_wrapped_function_keeps_name_docstring_and_signature(fake):
    f = polybridge.wrap(double, src="toy", dst="fake")
    assert (f.__name__, f.__doc__) == ("double", "Return twice the input.")
    assert inspect.signature(f) == inspect.signature(double)


def test_nobody_is_led_past_the_wrapped_function(fake):
    """TensorFlow calls what `__wrapped__` leads to."""
    assert not hasattr(polybridge.wrap(double, src="toy", dst="fake"), "__wrapped__")


def test_an_object_that_can_be_called_may_be_wrapped(fake, x):
    class Scale:
        """Scales."""

        def __call__(self, x):
            return 2 * x

    f = polybridge.wrap(Scale(), src="toy", dst="fake")
    assert (f.__name__, f.__doc__) == ("Scale", "Scales.")
    assert f(x).value.tolist() == [6.0, 6.0]


def test_a_wrapped_object_does_not_spread_its_attributes_over_the_function(fake):
    """They would go stale: `model.training`, for one."""

    class Scale:
        def __init__(self):
            self.training = True

        def __call__(self, x):
            return 2 * x

    assert not hasattr(polybridge.wrap(Scale(), src="toy", dst="fake"), "training")


def test_a_builtin_without_a_signature_may_be_wrapped(fake, x):
    f = polybridge.wrap(max, src="toy", dst="fake")
    assert f.__name__ == "max"


def test_a_partial_may_be_wrapped(fake, x):
    f = polybridge.wrap(functools.partial(lambda y, x: y * x, 5), src="toy", dst="fake")
    assert f(x).value.tolist() == [15.0, 15.0]


# What reaches the function and comes back.


def test_tensors_cross_both_ways(fake, x):
    f = polybridge.wrap(double, src="toy", dst="fake")
    assert fake.is_tensor(f(x))
    assert f(x).value.tolist() == [6.0, 6.0]


def test_a_numpy_argument_reaches_the_function_as_its_own_tensor(fake, x):
    f = polybridge.wrap(lambda x, y: x * y, src="toy", dst="fake")
    assert f(x, np.array(2.0)).value.tolist() == [6.0, 6.0]


def test_a_function_may_take_no_tensor_at_all(fake):
    f = polybridge.wrap(lambda n: toy.array([n]), src="toy", dst="fake")
    assert f(7).value.tolist() == [7]


def test_a_result_keeps_its_structure_and_static_parts(fake, x):
    f = polybridge.wrap(lambda x: {"y": (x, None), "n": 3, "s": "text"}, src="toy", dst="fake")
    result = f(x)
    assert fake.is_tensor(result["y"][0])
    assert (result["y"][1], result["n"], result["s"]) == (None, 3, "text")


def test_each_call_sees_its_own_static_values(fake, x):
    f = polybridge.wrap(lambda x, n: (x, type(n), n), src="toy", dst="fake")
    found = [f(x, n)[1:] for n in (1, 1.0, True, 1)]
    assert found == [(int, 1), (float, 1.0), (bool, True), (int, 1)]


def test_a_function_sees_a_dict_in_the_order_of_this_call(fake, x):
    f = polybridge.wrap(lambda tree, **options: [*tree, *options], src="toy", dst="fake")
    assert f({"a": x, "b": x}, c=x, d=x) == ["a", "b", "c", "d"]
    assert f({"b": x, "a": x}, d=x, c=x) == ["b", "a", "d", "c"]


class Shape(tuple):
    """As torch.Size is one."""


@pytest.mark.parametrize(
    "make", [lambda: Shape((2, 3)), lambda: slice(0, 2), lambda: range(3)], ids=["tuple", "slice", "range"]
)
def test_immutable_values_share_a_native_function(fake, x, make):
    made = []
    fake.wrap_as_native = lambda relay: made.append(relay) or (lambda *xs: relay(xs))
    f = polybridge.wrap(lambda x, static: repr(static), src="toy", dst="fake")
    assert [f(x, make()) for _ in range(3)] == [repr(make())] * 3
    assert len(made) == 1


def test_a_static_object_is_seen_as_it_is_now(fake, x):
    options = {"n": 1}
    holder = type("Holder", (), {"options": options})()
    f = polybridge.wrap(lambda x, h: h.options["n"], src="toy", dst="fake")
    assert f(x, holder) == 1
    options["n"] = 2
    assert f(x, holder) == 2


def test_thousands_of_static_values_do_not_pile_up(fake, x):
    f = polybridge.wrap(lambda x, n: n, src="toy", dst="fake")
    made = []
    fake.wrap_as_native = lambda relay: made.append(1) or (lambda *xs: relay(xs))
    assert [f(x, n) for n in range(1000)] == list(range(1000))
    assert f(x, 999) == 999
    assert len(made) == 1000


def test_the_native_function_is_made_once_for_equal_structures(fake, x):
    made = []
    fake.wrap_as_native = lambda relay: made.append(relay) or (lambda *xs: relay(xs))
    f = polybridge.wrap(lambda x, n, **k: x, src="toy", dst="fake")
    for _ in range(3):
        f(x, 1, flag="a")
    assert len(made) == 1


def test_the_exception_of_the_function_reaches_the_caller(fake, x):
    class Own(Exception):
        pass

    def fail(x):
        raise Own("mine")

    with pytest.raises(Own, match="mine"):
        polybridge.wrap(fail, src="toy", dst="fake")(x)


def test_wrapped_functions_nest(fake, x):
    inner = polybridge.wrap(lambda y: y, src="fake", dst="toy")
    f = polybridge.wrap(lambda y: inner(y + 1) + 1, src="toy", dst="fake")
    assert f(x).value.tolist() == [5.0, 5.0]


def test_a_wrapped_function_may_call_itself(fake, x):
    def power(x, n):
        return x if n == 1 else x * back(again(back_out(x), n - 1))

    back = functools.partial(polybridge.convert, to="toy")
    back_out = functools.partial(polybridge.convert, to="fake")
    again = polybridge.wrap(power, src="toy", dst="fake")
    assert again(x, 4).value.tolist() == [81.0, 81.0]


def test_threads_may_call_one_wrapped_function(fake, x):
    f = polybridge.wrap(lambda x, n: x * n, src="toy", dst="fake")
    found, barrier = {}, threading.Barrier(8)

    def call(n):
        barrier.wait()
        found[n] = [f(x, n).value[0] for _ in range(20)]

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [3.0 * n] * 20 for n in range(8)}


# Converting.


def test_converting_takes_a_tree_and_leaves_the_rest(fake, x):
    tree = polybridge.convert({"x": x, "n": 1, "a": np.ones(2)}, to="toy")
    assert isinstance(tree["x"], toy.Array)
    assert isinstance(tree["a"], toy.Array)
    assert tree["n"] == 1


def test_what_is_the_targets_already_stays_the_same_object(two):
    assert polybridge.convert([two], to="toy")[0] is two


def test_converting_shares_no_memory_with_a_framework_that_writes(monkeypatch):
    register(monkeypatch, FakeBackend("one", writes=True))
    register(monkeypatch, FakeBackend("other", writes=False))
    x = polybridge.get_backend("one").full(1.0)
    assert not np.shares_memory(polybridge.convert(x, to="other").value, x.value)


def test_converting_refuses_what_cannot_cross_and_names_its_path(fake, x):
    def refuse(tensor):
        raise polybridge.UnsupportedTensorError("a tensor of dtype string")

    fake.dense = refuse
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"`polybridge.convert`: tree\['x'\]\[0\] .*string"):
        polybridge.convert({"x": [x]}, to="toy")


def test_converting_refuses_a_tensor_whose_history_would_be_lost(fake, x):
    def refuse(tensor):
        raise polybridge.UnsupportedTensorError("a tensor with gradient history")

    fake.check_detached = refuse
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"tree.*history"):
        polybridge.convert(x, to="toy")


def test_converting_refuses_a_composite_value_and_names_its_path(fake):
    fake.is_composite = lambda value: isinstance(value, range)
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"tree\[0\].*a range is not a dense tensor"):
        polybridge.convert([range(3)], to="toy")


def test_converting_to_an_unknown_framework_is_refused(two):
    with pytest.raises(polybridge.UnknownBackendError, match="'troch'"):
        polybridge.convert(two, to="troch")
