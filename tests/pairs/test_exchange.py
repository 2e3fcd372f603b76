"""Asks that memory is shared where that is safe, copied where it is not, and that copies are counted."""

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.observe import count_crossings
from tests.pairs import traps
from tests.pairs.dialects import dialect
from tests.pairs.isolation import isolated


@pytest.mark.parametrize("name", traps.TRAPS)
def test_polybridge_passes(name):
    isolated(traps.run, name, "polybridge").result()


@pytest.mark.parametrize("name", traps.TRAPS)
def test_a_plain_bridge_does_not(name):
    ended = isolated(traps.run, name, "naive")
    how = {"killed": "killed", "returned": "returned", "hung": "hung"}.get(ended.how) or (
        "wrong" if "AssertionError" in ended.value else "refused"
    )
    assert how == traps.TRAPS[name].plain, ended


# Counts. A function is trusted once its first call has shown that it neither writes to its inputs nor keeps them.


def trusted(fn, *xs):
    """Call a wrapped function often enough that polybridge trusts it."""
    for _ in range(3):
        fn(*xs)
    gc.collect()
    return fn


def counts(counter):
    return counter.crossings, counter.copies, counter.bytes_copied


def in_torch(fn, **options):
    return polybridge.wrap(fn, src="tensorflow", dst="torch", **options)


def in_tf(fn, **options):
    return polybridge.wrap(fn, src="torch", dst="tensorflow", **options)


def backward(fn, *xs):
    return torch.autograd.grad(fn(*xs), xs, torch.ones_like(xs[0]))


def tape_gradient(fn, *xs):
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = fn(*xs)
    return tape.gradient(y, xs, output_gradients=tf.ones_like(xs[0]))


def test_torch_inputs_of_a_trusted_tf_function_are_not_copied():
    x = torch.ones(1000)
    fn = trusted(in_torch(tf.reduce_sum), x)
    with count_crossings() as counter:
        fn(x)
    assert counts(counter) == (2, 1, 4)  # the scalar result is what was copied


def test_the_first_call_of_a_tf_function_gets_copies():
    with count_crossings() as counter:
        in_torch(tf.reduce_sum)(torch.ones(1000))
    assert counts(counter) == (2, 2, 4004)


def test_each_tf_result_is_copied_once_for_torch():
    x = torch.ones(1000, dtype=torch.float64)
    fn = trusted(in_torch(lambda x: (x * 2, x + 1)), x)
    with count_crossings() as counter:
        fn(x)
    assert counts(counter) == (3, 2, 16000)


def test_one_copy_a_result_and_one_a_gradient_in_torch():
    a, b = torch.ones(1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    fn = in_torch(lambda a, b: a * b)
    trusted(lambda *xs: backward(fn, *xs), a, b)
    with count_crossings() as counter:
        backward(fn, a, b)
    assert counts(counter) == (6, 3, 12000)  # a, b, y, its cotangent, two gradients


def test_inputs_in_a_new_structure_are_not_trusted_yet():
    x = torch.ones(1000)
    fn = trusted(in_torch(lambda x, n=1: tf.reduce_sum(x)), x)
    with count_crossings() as counter:
        fn(x, n=2)
    assert counter.copies == 2


def test_nothing_is_copied_for_a_trusted_torch_function_with_results_of_its_own():
    x = tf.ones([1000])
    fn = trusted(in_tf(lambda x: (x * 2, x.sin())), x)
    with count_crossings() as counter:
        fn(x)
    assert counts(counter) == (3, 0, 0)


def test_nothing_is_copied_for_the_gradient_of_a_trusted_torch_function():
    a, b = tf.random.normal([1000]), tf.random.normal([1000])
    fn = in_tf(lambda a, b: a.sin() * b.exp())
    trusted(lambda *xs: tape_gradient(fn, *xs), a, b)
    with count_crossings() as counter:
        tape_gradient(fn, a, b)
    assert counts(counter) == (6, 0, 0)


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x.view(10, 100), lambda x: x[1:]], ids=["same", "view", "tail"])
def test_a_torch_result_that_shares_memory_with_an_input_is_copied(fn):
    x = tf.ones([1000])
    wrapped = trusted(in_tf(fn), x)
    with count_crossings() as counter:
        wrapped(x)
    assert counter.copies == 1


def test_a_torch_result_that_is_held_elsewhere_is_copied():
    held = torch.ones(1000)
    fn = trusted(in_tf(lambda: held))
    with count_crossings() as counter:
        fn()
    assert counts(counter) == (1, 1, 4000)


def test_two_torch_results_on_one_memory_are_copied_at_least_once():
    fn = trusted(in_tf(lambda x: (lambda y: (y, y.view(10, 100)))(x * 2)), tf.ones([1000]))
    with count_crossings() as counter:
        first, second = fn(tf.ones([1000]))
    assert counter.copies >= 1
    assert float(tf.reduce_sum(first)) == float(tf.reduce_sum(second)) == 2000


@pytest.mark.parametrize(
    "x", [torch.ones(30, 40).T, torch.ones(1).expand(1200), torch.arange(1201.0)[1:]], ids=["T", "0", "off"]
)
def test_torch_inputs_that_tf_cannot_hold_are_copied_once(x):
    fn = trusted(in_torch(tf.reduce_sum, copy=False), x)
    with count_crossings() as counter:
        fn(x)
    assert counts(counter) == (2, 1, 4800)


def test_copy_true_copies_everything_always():
    x = torch.ones(1000, requires_grad=True)
    fn = in_torch(lambda x: x * 2, copy=True)
    trusted(lambda x: backward(fn, x), x)
    with count_crossings() as counter:
        backward(fn, x)
    assert counts(counter) == (4, 4, 16000)


def test_copy_true_copies_everything_always_for_a_torch_function():
    x = tf.ones([1000])
    fn = in_tf(lambda x: x * 2, copy=True)
    trusted(lambda x: tape_gradient(fn, x), x)
    with count_crossings() as counter:
        tape_gradient(fn, x)
    assert counts(counter) == (4, 4, 16000)


def test_copy_true_protects_a_function_that_keeps_its_input_after_many_calls():
    """With copy="auto" this is not seen (docs/exchange.md says so): the function has earned its trust before."""
    kept, count = [], iter(range(99))
    f = in_torch(lambda a: (kept.append(a) if next(count) >= 4 else None) or a * 2, copy=True)
    x = torch.zeros(3)
    for _ in range(6):
        x.add_(1)
        f(x)
    x.add_(1)
    assert tf.stack(kept).numpy().tolist() == [[5] * 3, [6] * 3]


def test_copy_false_copies_nothing_from_the_first_call_on():
    x = torch.ones(1000, requires_grad=True)
    with count_crossings() as counter:
        backward(in_torch(lambda x: x * 2, copy=False), x)
    assert counts(counter) == (4, 0, 0)


def test_copy_false_copies_nothing_for_a_torch_function():
    x = tf.ones([1000])
    with count_crossings() as counter:
        tape_gradient(in_tf(lambda x: x * 2, copy=False), x)
    assert counts(counter) == (4, 0, 0)


def test_copy_false_shares_the_memory_of_the_result():
    held = tf.ones([1000])
    y = in_torch(lambda: held, copy=False)()
    y[0] = 5
    assert float(held[0]) == 5.0


def test_copy_false_shares_the_memory_of_the_input():
    x, seen = torch.ones(1000), []
    in_torch(lambda x: seen.append(x), copy=False)(x)
    x[0] = 5
    assert float(seen[0][0]) == 5.0


@pytest.mark.parametrize("copy", ["always", None, 2, "Auto"])
def test_another_copy_policy_is_refused(copy):
    with pytest.raises(ValueError, match='copy="auto", True or False'):
        in_torch(tf.sin, copy=copy)


def test_a_trusted_torch_function_may_be_called_with_other_shapes():
    fn = trusted(in_tf(lambda x: x * 2), tf.ones([1000]))
    with count_crossings() as counter:
        fn(tf.ones([3, 5]))
    assert counts(counter) == (2, 0, 0)


def test_counters_see_other_threads_and_nest():
    fn, x = in_torch(tf.sin), torch.ones(3)
    with count_crossings() as outer:
        with count_crossings() as inner:
            thread = threading.Thread(target=fn, args=(x,))
            thread.start()
            thread.join()
        fn(x)
    assert (inner.crossings, outer.crossings) == (2, 4)


def test_counters_close_when_the_function_raises():
    def fail(x):
        raise KeyError

    with pytest.raises(KeyError), count_crossings() as counter:
        in_torch(fail)(torch.ones(3))
    before = counter.crossings
    in_torch(tf.sin)(torch.ones(3))
    assert counter.crossings == before == 1


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("complex128", 16), ("bool", 1), ("int16", 2)])
def test_bytes_are_counted_by_dtype(dtype, size):
    with count_crossings() as counter:
        in_torch(lambda: tf.zeros([100], dtype))()
    assert counts(counter) == (1, 1, 100 * size)


def test_results_of_tf_are_the_callers_alone():
    x = torch.ones(1000)
    fn = trusted(in_torch(lambda x: x), x)
    first, second = fn(x), fn(x)
    assert len({t.data_ptr() for t in (x, first, second)}) == 3


# A write by a function that was trusted.


def writer(flag):
    """Return a torch function that writes to its input when `flag` is not empty."""
    return lambda a: a.mul_(3) if flag else a * 3


def test_a_late_write_raises_and_names_the_way_out():
    flag = []
    fn = trusted(in_tf(writer(flag)), x := tf.constant([1.0, 2.0]))
    flag.append(1)
    with pytest.raises(polybridge.MutationError, match=r"wrote in place to args\[0\].*copy=True"):
        fn(x)


def test_a_late_write_under_a_tape_raises():
    flag = []
    fn = in_tf(writer(flag))
    trusted(lambda x: tape_gradient(fn, x), x := tf.constant([1.0, 2.0]))
    flag.append(1)
    with pytest.raises(polybridge.MutationError, match="copy=True"):
        tape_gradient(fn, x)


def test_a_late_write_to_a_second_input_names_it():
    flag = []
    fn = in_tf(lambda a, b: b.add_(a) if flag else a + b)
    trusted(fn, tf.ones(2), x := tf.ones(2))
    flag.append(1)
    with pytest.raises(polybridge.MutationError, match=r"args\[1\]"):
        fn(tf.ones(2), x)


def test_a_function_that_has_written_is_called_on_copies_from_then_on():
    flag = []
    fn = trusted(in_tf(writer(flag)), tf.constant([1.0, 2.0]))
    flag.append(1)
    with pytest.raises(polybridge.MutationError):
        fn(tf.constant([5.0, 6.0]))
    x = tf.constant([3.0, 4.0])
    assert fn(x).numpy().tolist() == [9.0, 12.0]
    assert x.numpy().tolist() == [3.0, 4.0]


def test_a_late_write_with_copy_true_is_harmless():
    flag, x = [], tf.constant([1.0, 2.0])
    fn = trusted(in_tf(writer(flag), copy=True), x)
    flag.append(1)
    assert fn(x).numpy().tolist() == [3.0, 6.0]
    assert x.numpy().tolist() == [1.0, 2.0]


def test_a_function_that_writes_from_the_first_call_on_is_never_trusted():
    fn, x = in_tf(lambda a: a.mul_(3)), tf.constant([1.0, 2.0])
    assert [fn(x).numpy().tolist() for _ in range(4)] == [[3.0, 6.0]] * 4
    assert x.numpy().tolist() == [1.0, 2.0]


def test_a_function_that_writes_has_the_right_gradient():
    fn, x = in_tf(lambda a: a.mul_(3).sin_()), tf.constant([0.5, 2.0])
    for _ in range(3):
        (gradient,) = tape_gradient(fn, x)
        np.testing.assert_allclose(gradient, 3 * np.cos([1.5, 6.0]), rtol=1e-6)


def test_another_function_is_not_blamed():
    flag = []
    first, second = in_tf(writer(flag)), in_tf(lambda a: a * 2)
    trusted(first, x := tf.constant([1.0])), trusted(second, x)
    flag.append(1)
    with pytest.raises(polybridge.MutationError):
        first(tf.constant([9.0]))
    assert second(x).numpy().tolist() == [2.0]


# `polybridge.convert`.


def test_convert_gives_tensors_of_the_target_in_the_same_tree(pair, src, dst):
    tree = {"a": [src.tensor([1.0, 2.0]), 3], "b": (src.tensor(np.array([True])), "text", None)}
    found = polybridge.convert(tree, dst.name)
    assert dst.is_tensor(found["a"][0]) and dst.is_tensor(found["b"][0])
    assert (found["a"][1], found["b"][1:]) == (3, ("text", None))
    assert dst.numpy(found["a"][0]).tolist() == [1.0, 2.0]


def test_convert_there_and_back_gives_the_same_values(pair, src, dst):
    x = src.tensor(np.array([[1.5, -2.0]]))
    assert src.numpy(polybridge.convert(polybridge.convert(x, dst.name), src.name)).tolist() == [[1.5, -2.0]]


def test_convert_leaves_tensors_of_the_target_alone(dst):
    x = dst.tensor([1.0])
    assert polybridge.convert([x], dst.name)[0] is x


def test_convert_takes_numpy_arrays_and_tensors_of_several_frameworks(dst):
    found = polybridge.convert([np.ones(2), torch.ones(2), tf.ones(2), np.float32(1)], dst.name)
    assert all(map(dst.is_tensor, found))


def test_convert_takes_parameters_and_variables(src, dst):
    assert dst.numpy(polybridge.convert(src.parameter([1.0, 2.0]), dst.name)).tolist() == [1.0, 2.0]


def test_convert_shares_no_memory_with_what_torch_may_write():
    x = torch.ones(1000)
    converted = polybridge.convert(x, "tensorflow")
    x.zero_()
    assert float(tf.reduce_sum(converted)) == 1000


def test_convert_gives_torch_memory_of_its_own():
    x = tf.ones([1000])
    polybridge.convert(x, "torch").zero_()
    assert float(tf.reduce_sum(x)) == 1000


def test_convert_refuses_a_tensor_inside_a_graph():
    x = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"tree\['x'\].*detach"):
        polybridge.convert({"x": x}, "tensorflow")
    assert tf.reduce_sum(polybridge.convert({"x": x.detach()}, "tensorflow")["x"]).numpy() == 6


def test_convert_names_the_leaf_that_cannot_cross():
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"tree\['words'\]\[1\].*string"):
        polybridge.convert({"words": [tf.ones(2), tf.constant(["text"])]}, "torch")


def test_convert_names_an_unknown_framework():
    with pytest.raises(polybridge.UnknownBackendError, match=r"'torhc'.*torch"):
        polybridge.convert([], "torhc")


@pytest.mark.parametrize("layout", ["tail", "transposed", "expanded_row", "lazily_negative", "element", "empty"])
def test_convert_takes_any_layout(layout):
    values = isolated(_converted, layout).result()
    np.testing.assert_array_equal(values, dialect("torch").numpy(dialect("torch").layouts()[layout]), strict=True)


def _converted(layout):
    return (polybridge.convert(dialect("torch").layouts()[layout], "tensorflow") * 1).numpy()
