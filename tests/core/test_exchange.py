"""Asks which moves copy: a table of facts about two backends, and the copies and bytes that each needs."""

import ctypes
import threading

import numpy as np
import pytest

import polybridge
from polybridge.core import dlpack
from polybridge.core import exchange as core
from polybridge.core.exchange import Exchange, Loan, array_to, move, widened
from polybridge.observe import count_crossings
from tests.core.fakes import FakeBackend, Memory

BYTES = 16  # of one tensor of `FakeBackend.full`


def pair(source_writes=False, dest_writes=False, copy="auto", **facts) -> Exchange:
    """Return an exchange between two fakes; `facts` are the source's."""
    return Exchange(FakeBackend("dest", writes=dest_writes), FakeBackend("source", writes=source_writes, **facts), copy)


def shares(one, other) -> bool:
    return np.shares_memory(one.value, other.value)


# Moving.


def test_a_move_shares_memory():
    exchange = pair()
    x = exchange.source.full(1.0)
    with count_crossings() as counts:
        moved = move(x, exchange.source, exchange.dest, own=False)
    assert exchange.dest.is_tensor(moved)
    assert shares(x, moved)
    assert (counts.crossings, counts.copies, counts.bytes_copied) == (1, 0, 0)


def test_a_move_to_own_copies():
    exchange = pair()
    x = exchange.source.full(1.0)
    with count_crossings() as counts:
        moved = move(x, exchange.source, exchange.dest, own=True)
    assert not shares(x, moved)
    assert (counts.crossings, counts.copies, counts.bytes_copied) == (1, 1, BYTES)


@pytest.mark.parametrize("who", ["source", "dest"])
def test_without_dlpack_a_move_goes_through_numpy_by_copy(who):
    exchange = pair()
    getattr(exchange, who).dlpack = False
    x = exchange.source.full(1.0)
    with count_crossings() as counts:
        moved = move(x, exchange.source, exchange.dest, own=False)
    assert not shares(x, moved)
    assert (counts.crossings, counts.copies, counts.bytes_copied) == (1, 1, BYTES)


def test_making_a_tensor_dense_counts_as_a_copy_and_makes_the_second_one_needless():
    exchange = pair(dense=lambda x: exchange.source.copy(x))
    x = exchange.source.full(1.0)
    with count_crossings() as counts:
        move(x, exchange.source, exchange.dest, own=True)
    assert counts.copies == 1


def test_a_tensor_that_cannot_cross_says_so():
    def refuse(x):
        raise polybridge.UnsupportedTensorError("a tensor of dtype string")

    exchange = pair(dense=refuse)
    with pytest.raises(polybridge.UnsupportedTensorError, match="a tensor of dtype string"):
        move(exchange.source.full(1.0), exchange.source, exchange.dest, own=False)


class Aligned(FakeBackend):
    """A fake whose capsules are real, so that their addresses can be read."""

    capsules: list

    def __init__(self, offsets, **facts) -> None:
        super().__init__("aligned", **facts)
        self.offsets = iter(offsets)

    def copy(self, tensor):
        return self.at(next(self.offsets))

    def at(self, offset: int):
        """Return two numbers at so many bytes from a multiple of 64."""
        buffer = np.zeros(64)
        start = (-buffer.ctypes.data % 64 + offset) // 8
        return self.tensor(Memory(buffer[start : start + 2]))

    def to_dlpack(self, tensor):
        self.last = tensor
        return tensor.value.__dlpack__()


@pytest.mark.parametrize(("offset", "copies"), [(0, 0), (8, 1), (16, 1), (56, 1)])
def test_memory_that_is_not_aligned_is_copied(offset, copies):
    origin = Aligned([0])
    target = FakeBackend("target", alignment=64, from_dlpack=dlpack.address)
    with count_crossings() as counts:
        assert move(origin.at(offset), origin, target, own=False) % 64 == 0
    assert counts.copies == copies


def test_an_origin_that_never_aligns_goes_through_numpy():
    origin = Aligned([8])
    target = FakeBackend("target", alignment=64, from_dlpack=pytest.fail)
    moved = move(origin.at(8), origin, target, own=False)
    assert target.is_tensor(moved)


def test_the_address_of_a_capsule_is_that_of_its_first_element():
    array = np.arange(8.0)[3:]
    assert dlpack.address(array.__dlpack__()) == array.ctypes.data


def test_reading_an_address_leaves_the_capsule_usable():
    capsule = np.arange(2.0).__dlpack__()
    dlpack.address(capsule)
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    assert is_valid(capsule, b"dltensor")


# Giving: what the caller gets for good.


@pytest.mark.parametrize(
    ("source_writes", "dest_writes", "copy", "copies"),
    [
        (False, False, "auto", 0),
        (True, False, "auto", 1),
        (False, True, "auto", 1),
        (True, True, "auto", 1),
        (False, False, True, 1),
        (True, True, True, 1),
        (False, False, False, 0),
        (True, True, False, 0),
    ],
)
def test_a_result_in_use_is_copied_where_somebody_writes(source_writes, dest_writes, copy, copies):
    exchange = pair(source_writes, dest_writes, copy)
    x = exchange.source.full(1.0)
    kept = exchange.source.reference(x)
    with count_crossings() as counts:
        given = exchange.give([x], "f", "result {}".format)[0]
    assert counts.copies == copies
    assert shares(kept, given) is (copies == 0)


def test_a_fresh_result_is_never_copied():
    exchange = pair(source_writes=True, dest_writes=True)
    results = [exchange.source.full(1.0)]
    with count_crossings() as counts:
        exchange.give(results, "f", "result {}".format)
    assert counts.copies == 0


def test_two_results_on_one_memory_are_given_apart():
    exchange = pair(source_writes=True, dest_writes=True)
    x = exchange.source.full(1.0)
    results = [x, exchange.source.reference(x)]
    del x
    given = exchange.give(results, "f", "result {}".format)
    assert not shares(*given)


def test_giving_empties_the_list():
    exchange = pair()
    results = [exchange.source.full(1.0)]
    exchange.give(results, "f", "result {}".format)
    assert results == []


@pytest.mark.parametrize("copies", [0, 1])
def test_a_fleeting_caller_gets_an_array_which_counts_as_a_copy_where_it_was_made_dense(copies):
    source = FakeBackend("source")
    if copies:
        source.dense = source.copy
    x = source.full(1.0)
    with count_crossings() as counts:
        given = Exchange(FakeBackend("dest"), source, fleeting=True).give([x], "f", "result {}".format)[0]
    assert np.shares_memory(given, x.value)
    assert (counts.crossings, counts.copies) == (1, copies)


# Lending: what the function gets for a call.


def lend_and_run(loan: Loan, fn, *tensors):
    """Lend tensors to `fn` as a relay does, and return its result."""
    return loan.run(lambda lent: fn(*lent), loan.lend(tensors), "f (src='source')", "input {}".format)


def copies_of_a_call(loan: Loan, fn, *tensors) -> int:
    with count_crossings() as counts:
        lend_and_run(loan, fn, *tensors)
    return counts.copies


def square(x):
    return x.value**2


WATCHED = {"source_writes": True, "counts_writes": True}


def test_between_frameworks_that_do_not_write_nothing_is_copied():
    exchange = pair()
    assert copies_of_a_call(exchange.loan(), square, exchange.dest.full(1.0)) == 0


def test_copy_false_never_copies():
    exchange = pair(source_writes=True, dest_writes=True, copy=False)
    assert copies_of_a_call(exchange.loan(), square, exchange.dest.full(1.0)) == 0


def test_copy_false_does_not_watch():
    exchange = pair(copy=False, **WATCHED)
    x = exchange.dest.full(1.0)
    lend_and_run(exchange.loan(), lambda y: y.write(5.0), x)
    assert x.value[0] == 5.0


@pytest.mark.parametrize("facts", [{"dest_writes": True}, {"source_writes": True}, WATCHED], ids=str)
def test_a_function_that_lets_go_is_trusted_after_its_first_call(facts):
    exchange = pair(**facts)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, square, x) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("facts", [{"dest_writes": True}, {"source_writes": True}, WATCHED], ids=str)
def test_a_function_that_keeps_its_input_is_lent_copies(facts):
    exchange = pair(**facts)
    loan, x, kept = exchange.loan(), exchange.dest.full(1.0), []
    assert [copies_of_a_call(loan, kept.append, x) for _ in range(3)] == [1, 1, 1]


def test_a_function_that_once_kept_its_input_is_never_trusted():
    exchange = pair(dest_writes=True)
    loan, x, kept = exchange.loan(), exchange.dest.full(1.0), []
    assert [copies_of_a_call(loan, kept.append, x) for _ in range(2)] == [1, 1]
    kept.clear()
    assert [copies_of_a_call(loan, square, x) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("facts", [{"dest_writes": True}, WATCHED], ids=str)
def test_while_the_residual_lives_nothing_is_judged(facts):
    """A residual holds the inputs by right; whether anybody else does shows when it is gone."""
    exchange = pair(**facts)
    loan, x, residual = exchange.loan(), exchange.dest.full(1.0), [Holder()]
    lend_and_run(loan, lambda y: setattr(residual[0], "kept", y), x)
    loan.until(residual[0])
    assert copies_of_a_call(loan, square, x) == 1
    residual.clear()
    assert copies_of_a_call(loan, square, x) == 0


class Holder:
    """Something that holds what a function computed with."""


def test_a_function_that_writes_is_lent_copies():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, lambda y: y.write(5.0), x) for _ in range(3)] == [1, 1, 1]
    assert x.value[0] == 1.0


def test_a_write_past_the_counter_is_seen_in_the_bytes():
    def sneak(y):
        y.memory.value[...] = 5.0

    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, sneak, x) for _ in range(2)] == [1, 1]
    assert x.value[0] == 1.0


def test_nan_is_no_sign_of_a_write():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(np.nan)
    assert [copies_of_a_call(loan, square, x) for _ in range(2)] == [1, 0]


def test_a_trusted_function_that_writes_is_an_error_that_names_call_and_input():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    lend_and_run(loan, square, x)
    with pytest.raises(polybridge.MutationError, match=r"`f \(src='source'\)` wrote in place to input 0.*copy=True"):
        lend_and_run(loan, lambda y: y.write(5.0), x)


def test_a_function_that_broke_trust_is_lent_copies_from_then_on():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    lend_and_run(loan, square, x)
    with pytest.raises(polybridge.MutationError):
        lend_and_run(loan, lambda y: y.write(5.0), x)
    assert [copies_of_a_call(loan, square, x) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("facts", [{}, {"dest_writes": True}, {"source_writes": True}, WATCHED], ids=str)
def test_copy_true_copies_at_every_call(facts):
    exchange = pair(copy=True, **facts)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, square, x) for _ in range(3)] == [1, 1, 1]


def test_a_write_of_the_same_values_is_a_write():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, lambda y: y.write(1.0), x) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("facts", [{"dest_writes": True}, WATCHED], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_function_is_judged_by_its_first_call_alone(facts, first):
    """Whose copies it may hold as long as the residual of that call lives, whatever becomes of later ones."""
    exchange = pair(**facts)
    loan, x, residuals = exchange.loan(), exchange.dest.full(1.0), [Holder(), Holder()]
    for residual in residuals:
        lend_and_run(loan, lambda y, residual=residual: setattr(residual, "kept", y), x)
        loan.until(residual)
    del residual, residuals[0 if first else 1]
    assert copies_of_a_call(loan, square, x) == (0 if first else 1)
    residuals.clear()
    assert copies_of_a_call(loan, square, x) == 0


def test_the_residual_of_a_call_that_showed_nothing_is_not_waited_for():
    exchange = pair(**WATCHED)
    loan, x, residuals = exchange.loan(), exchange.dest.full(1.0), [Holder(), Holder()]
    for residual, given in zip(residuals, (None, x), strict=True):
        lend_and_run(loan, lambda y, residual=residual: setattr(residual, "kept", y), given)
        loan.until(residual)
    del residual, residuals[0]
    assert copies_of_a_call(loan, square, x) == 1
    residuals.clear()
    assert copies_of_a_call(loan, square, x) == 0


REFUSED = {**WATCHED, "is_refused_write": lambda error: isinstance(error, PermissionError)}


def refuse(x):
    raise PermissionError("of a leaf")


@pytest.mark.parametrize("by_dlpack", [True, False])
def test_a_write_that_the_source_refuses_is_a_mutation_once_the_function_was_trusted(by_dlpack):
    exchange = pair(**REFUSED)
    exchange.dest.dlpack = by_dlpack
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    with pytest.raises(PermissionError):  # a copy, which is no leaf: of the function itself
        lend_and_run(loan, refuse, x)
    first, trusted = (copies_of_a_call(loan, square, x) for _ in range(2))
    assert first == trusted + 1
    with pytest.raises(polybridge.MutationError, match=r"f .*of a leaf"):
        lend_and_run(loan, refuse, x)
    assert [copies_of_a_call(loan, square, x) for _ in range(2)] == [first, first]


def test_an_absent_tensor_is_lent_as_none():
    exchange = pair(**WATCHED)
    assert lend_and_run(exchange.loan(), lambda x, y: (x.value[0], y), exchange.dest.full(1.0), None) == (1.0, None)


@pytest.mark.parametrize("facts", [{"dest_writes": True}, WATCHED], ids=str)
def test_a_call_without_tensors_proves_nothing(facts):
    exchange = pair(**facts)
    loan, x, kept = exchange.loan(), exchange.dest.full(1.0), []
    lend_and_run(loan, lambda y: None, None)
    assert copies_of_a_call(loan, kept.append, x) == 1


@pytest.mark.parametrize("facts", [{"dest_writes": True}, WATCHED], ids=str)
def test_a_call_without_one_of_the_tensors_does_not_prove_what_becomes_of_it(facts):
    def keep_second(x, y):
        kept.append(y)

    exchange = pair(**facts)
    loan, x, kept = exchange.loan(), exchange.dest.full(1.0), []
    lend_and_run(loan, keep_second, x, None)
    lend_and_run(loan, keep_second, x, x)
    x.write(5.0)
    assert kept[-1].value[0] == 1.0


def test_a_function_that_raises_is_not_trusted():
    exchange = pair(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    with pytest.raises(ZeroDivisionError):
        lend_and_run(loan, lambda y: 1 / 0, x)
    assert copies_of_a_call(loan, square, x) == 1


class Interrupted(FakeBackend):
    """A fake on which another thread comes between, once, when it is about to be asked what it owns."""

    meanwhile = None

    @property
    def owns(self):
        interruption, self.meanwhile = self.meanwhile, None
        if interruption:
            thread = threading.Thread(target=interruption)
            thread.start()
            thread.join()
        return super().owns


def test_two_threads_may_find_a_function_trustworthy_at_once():
    exchange = Exchange(Interrupted("dest", writes=True), FakeBackend("source", writes=False))
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    lend_and_run(loan, square, x)
    exchange.dest.meanwhile = lambda: lend_and_run(loan, square, x)
    assert copies_of_a_call(loan, square, x) == 0


# Without DLPack what is lent is a copy already.


def by_numpy(**facts) -> Exchange:
    exchange = pair(**facts)
    exchange.dest.dlpack = False
    return exchange


def test_without_dlpack_there_is_one_copy_where_writes_are_not_counted():
    exchange = by_numpy(dest_writes=True)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    assert [copies_of_a_call(loan, square, x) for _ in range(2)] == [1, 1]


def test_without_dlpack_a_function_may_keep_what_it_is_lent():
    exchange = by_numpy(**WATCHED)
    loan, x, kept = exchange.loan(), exchange.dest.full(1.0), []
    assert [copies_of_a_call(loan, kept.append, x) for _ in range(3)] == [2, 1, 1]


def test_without_dlpack_a_trusted_function_may_write_where_nobody_refuses_it():
    exchange = by_numpy(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    lend_and_run(loan, square, x)
    lend_and_run(loan, lambda y: y.write(5.0), x)
    assert x.value[0] == 1.0


def test_without_dlpack_a_function_that_once_wrote_is_never_trusted():
    exchange = by_numpy(**WATCHED)
    loan, x = exchange.loan(), exchange.dest.full(1.0)
    lend_and_run(loan, lambda y: y.write(5.0), x)
    assert [copies_of_a_call(loan, square, x) for _ in range(3)] == [2, 2, 2]


def test_memory_that_does_not_last_is_copied_even_where_the_caller_promises_not_to_write():
    source = FakeBackend("source", writes=False)
    source.adopt = lambda array: source.tensor(Memory(array))
    dest, kept = FakeBackend("dest", writes=False, dlpack=False), []
    for fleeting, shared in ((True, False), (False, True)):
        x = dest.full(1.0)
        lend_and_run(Exchange(dest, source, copy=False, fleeting=fleeting).loan(), kept.append, x)
        assert shares(kept.pop(), x) is shared


def test_what_was_made_dense_is_adopted_without_another_copy():
    origin, target = FakeBackend("origin", dlpack=False), FakeBackend("target")
    origin.dense, target.adopt = origin.copy, lambda array: target.tensor(Memory(array))
    with count_crossings() as counts:
        move(origin.full(1.0), origin, target, own=True)
    assert counts.copies == 1


# Copies of weights that cannot be shared as they lie, which are kept.


@pytest.fixture
def weights():
    """A framework of which all tensors are weights, in a layout of its own."""
    backend = FakeBackend("weights", counts_writes=True, lasts=lambda tensor: True)
    backend.dense = lambda x: x if hasattr(x, "is_dense") else dense_copy(backend, x)
    return backend


def dense_copy(backend, x):
    copy = backend.copy(x)
    copy.is_dense = True
    return copy


def test_a_copy_of_a_weight_is_kept_for_a_function_that_cannot_write_alone(weights):
    reading, writing = (Exchange(weights, FakeBackend(writes=w), copy=False).loan() for w in (False, True))
    weight = weights.full(1.0)
    assert [copies_of_a_call(writing, square, weight) for _ in range(2)] == [1, 1]
    assert id(weight) not in core._copies
    assert [copies_of_a_call(reading, square, weight) for _ in range(2)] == [1, 0]
    assert copies_of_a_call(writing, square, weight) == 1  # not the one that is kept


def test_a_kept_copy_goes_when_the_weight_needs_none_any_more(weights):
    loan, weight = Exchange(weights, FakeBackend(writes=False), copy=False).loan(), weights.full(1.0)
    lend_and_run(loan, square, weight)
    assert id(weight) in core._copies
    weight.is_dense = True
    weight.write(2.0)
    assert lend_and_run(loan, square, weight)[0] == 4.0
    assert id(weight) not in core._copies


def test_a_kept_copy_of_the_same_bytes_in_another_shape_is_not_that_of_the_weight(weights):
    loan, weight = Exchange(weights, FakeBackend(writes=False), copy=False).loan(), weights.from_numpy(np.zeros((2, 3)))
    lend_and_run(loan, square, weight)
    weight.memory.value = np.zeros((3, 2))
    assert lend_and_run(loan, square, weight).shape == (3, 2)


def test_so_many_copies_are_kept(weights, monkeypatch):
    monkeypatch.setattr(core, "_COPIES", len(core._copies) + 1)
    loan, kept = Exchange(weights, FakeBackend(writes=False), copy=False).loan(), [weights.full(n) for n in (1.0, 2.0)]
    for _ in range(2):
        assert [lend_and_run(loan, square, x)[0] for x in kept] == [1.0, 4.0]
    assert [id(x) in core._copies for x in kept] == [True, False]


# Widening.


def test_a_gradient_gets_the_dtype_back_that_its_tensor_had():
    backend = FakeBackend()
    x = backend.from_numpy(np.ones(2, "float32"))
    assert widened(backend, x, "float64").value.dtype == np.float64
    assert widened(backend, x, "float32") is widened(backend, x, None) is x
    assert widened(backend, None, "float64") is None


# Counting, and NumPy arrays.


def test_counts_nest():
    exchange = pair()
    with count_crossings() as outer:
        move(exchange.source.full(1.0), exchange.source, exchange.dest, own=False)
        with count_crossings() as inner:
            move(exchange.source.full(1.0), exchange.source, exchange.dest, own=False)
    assert (outer.crossings, inner.crossings) == (2, 1)


def test_counts_end_with_their_context():
    exchange = pair()
    with count_crossings() as counts:
        pass
    move(exchange.source.full(1.0), exchange.source, exchange.dest, own=False)
    assert counts.crossings == 0


def test_counts_take_every_thread():
    exchange = pair()
    with count_crossings() as counts:
        thread = threading.Thread(
            target=move, args=(exchange.source.full(1.0), exchange.source, exchange.dest), kwargs={"own": False}
        )
        thread.start()
        thread.join()
    assert counts.crossings == 1


@pytest.mark.parametrize("value", [np.arange(3.0), np.float32(2), np.array(True), np.zeros((0, 2), np.int8)], ids=repr)
def test_a_numpy_value_becomes_a_tensor(value):
    tensor = array_to(FakeBackend(), value, "f", "args[0]")
    np.testing.assert_array_equal(tensor.value, value, strict=True)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.array(["text"]), "str128"),
        (np.array([object()]), "object"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"datetime64\[D\]"),
        (np.zeros(1, [("a", "f4")]), "void32"),
        (np.zeros(1, np.longdouble), "longdouble|float128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_numpy_array_that_is_no_tensor_is_named(value, dtype):
    with pytest.raises(polybridge.UnsupportedTensorError, match=rf"`f`: args\[0\] .*NumPy dtype ({dtype})"):
        array_to(FakeBackend(), value, "f", "args[0]")


def test_a_masked_array_does_not_lose_its_mask_silently():
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    with pytest.raises(polybridge.UnsupportedTensorError, match="mask"):
        array_to(FakeBackend(), masked, "f", "args[0]")
