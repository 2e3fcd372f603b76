"""Asks how long a residual lives: with its token's memory, or in a bounded stash that evaluates again on a miss."""

import contextlib
import gc
import weakref

import numpy as np
import pytest

import polybridge
from polybridge.core import residuals, tokens


class Residual:
    """Stands for a pullback relay."""


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """Start with empty tables and small bounds."""
    monkeypatch.setattr(residuals, "_waiting", residuals._Table(entries=3, size=100_000, remembered=5))
    monkeypatch.setattr(residuals, "_used_once", residuals._Table(entries=2, size=20_000, remembered=2))
    monkeypatch.setattr(residuals, "_used", residuals._Table(entries=2, size=100_000, remembered=2))


# Buffers.


def test_a_token_finds_its_residual():
    one, other = Residual(), Residual()
    tokens_ = residuals.keep(one), residuals.keep(other)
    assert [residuals.kept(int(token[0])) for token in tokens_] == [one, other]


def test_a_buffer_is_aligned_and_repeats_its_number():
    token = residuals.keep(Residual(), 5)
    assert type(token) is np.ndarray and token.dtype == np.int64 and token.flags.c_contiguous
    assert token.shape == (5,) and (token == token[0]).all() and token.ctypes.data % 64 == 0


def test_a_residual_dies_with_the_last_view_of_its_buffer():
    residual = Residual()
    token, dead = residuals.keep(residual, 2), weakref.ref(residual)
    number, view = int(token[0]), token.view(np.uint32)[1:]
    del residual, token
    gc.collect()
    assert dead() is not None
    del view
    gc.collect()
    assert dead() is None
    with pytest.raises(polybridge.ResidualError, match="whose forward is gone"):
        residuals.kept(number)


def test_a_copied_token_keeps_nothing_alive():
    copied = residuals.keep(Residual()).copy()
    with pytest.raises(polybridge.ResidualError, match="copied"):
        residuals.kept(int(copied[0]))


# The stash.


def never():
    """Stand for an evaluation that is not needed."""
    raise AssertionError("evaluated again")


def stash(value=1.0, randomness=None):
    """Stash a residual whose forward returned `value`; return its number and itself."""
    residual = Residual()
    return residuals.stash(residual, [np.full(1000, value)], randomness), residual


def evict():
    """Let all that waits make room."""
    for number, (_, forward) in list(residuals._waiting._kept.items()):
        residuals._waiting.take(number)
        residuals._waiting._forwards[number] = forward


def test_a_stashed_residual_is_found_again_and_again():
    number, residual = stash()
    assert residuals.stashed(number, never) is residuals.stashed(number, never) is residual


def test_what_was_asked_for_once_makes_room_for_little():
    numbers = []
    for _ in range(3):  # of 8 KB each
        number, residual = stash()
        numbers.append((number, weakref.ref(residual)))
        assert residuals.stashed(number, never) is residual
        del residual
    gc.collect()
    assert [dead() is None for _, dead in numbers] == [True, False, False]
    again = Residual()
    assert residuals.stashed(numbers[0][0], lambda: (again, [np.full(1000, 1.0)])) is again
    assert residuals.stashed(numbers[0][0], never) is again


def test_a_residual_in_a_buffer_is_found_by_the_same_call():
    residual = Residual()
    token = residuals.keep(residual)
    assert residuals.stashed(int(token[0]), never) is residual


def test_the_stash_is_bounded_and_drops_the_oldest():
    first, *others = [stash() for _ in range(4)]
    assert len(residuals._waiting) == 3
    for number, residual in others:
        assert residuals.stashed(number, never) is residual
    dead = weakref.ref(first[1])
    number = first[0]
    del first
    gc.collect()
    assert dead() is None
    again = Residual()
    assert residuals.stashed(number, lambda: (again, [np.full(1000, 1.0)])) is again


def test_the_stash_is_bounded_by_the_size_of_the_results():
    large = [residuals.stash(Residual(), [np.zeros(10_000)], None) for _ in range(2)]  # of 80 KB each
    with pytest.raises(AssertionError, match="evaluated again"):
        residuals.stashed(large[0], never)
    residuals.stashed(large[1], never)


def test_what_was_asked_for_does_not_make_what_was_not_be_forgotten():
    """As in a loop of more steps than are kept, whose backward begins with the last of them."""
    numbers = [stash()[0] for _ in range(8)]
    for number in reversed(numbers[5:]):
        residuals.stashed(number, never)
    for number in reversed(numbers[:5]):
        again = Residual()
        assert residuals.stashed(number, lambda again=again: (again, [np.full(1000, 1.0)])) is again


def test_a_difference_in_one_column_is_seen():
    values = np.random.default_rng(0).normal(size=(1000, 2))
    number = residuals.stash(Residual(), [values], None)
    evict()
    with pytest.raises(polybridge.ResidualError, match="gave other values"):
        residuals.stashed(number, lambda: (Residual(), [values + np.array([0, 1])]))


def test_what_was_asked_for_makes_room_before_what_was_not():
    found = [stash() for _ in range(3)]
    for number, _ in found:
        residuals.stashed(number, never)
    assert len(residuals._waiting) == 0 and len(residuals._used_once) == 2


def test_another_evaluation_is_kept_too():
    number, _ = stash()
    evict()
    again = Residual()
    assert residuals.stashed(number, lambda: (again, [np.full(1000, 1.0)])) is again
    assert residuals.stashed(number, never) is again


def test_another_evaluation_has_the_random_numbers_of_the_first():
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state

    @contextlib.contextmanager
    def as_before():
        now, generator.bit_generator.state = generator.bit_generator.state, before
        yield
        generator.bit_generator.state = now

    outputs = generator.normal(size=10)
    number = residuals.stash(Residual(), [outputs], as_before)
    evict()
    generator.normal(size=7)
    after, again = generator.bit_generator.state, Residual()
    assert residuals.stashed(number, lambda: (again, [generator.normal(size=10)])) is again
    assert generator.bit_generator.state == after


def test_another_evaluation_with_other_values_is_refused():
    number, _ = stash(1.0)
    evict()
    with pytest.raises(polybridge.ResidualError, match="gave other values"):
        residuals.stashed(number, lambda: (Residual(), [np.full(1000, 2.0)]))


def test_a_forward_that_is_forgotten_is_gone():
    number, _ = stash()
    for _ in range(10):
        stash()
    with pytest.raises(polybridge.ResidualError, match="whose forward is gone"):
        residuals.stashed(number, never)


# Tokens of batches.


@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 3)], ids=str)
def test_a_token_of_a_batch_is_read_as_a_whole(rows):
    residual = Residual()
    token = tokens.keep(residual, rows)
    assert token.shape == (*rows, tokens.SIZE)
    assert residuals.kept(tokens.read(token)) is residual
    assert residuals.kept(tokens.read(token.view(np.uint32).view(np.int64))) is residual


@pytest.mark.parametrize("rows", [(), (3,), (2, 3)], ids=str)
def test_a_token_is_written_for_a_residual_that_is_stashed(rows):
    number, residual = stash()
    token = np.zeros((*rows, tokens.SIZE), np.int64)
    tokens.write(token, number)
    assert residuals.stashed(tokens.read(token), never) is residual


@pytest.mark.parametrize("shape", [(2,), (3, 2)], ids=str)
def test_a_token_of_zeros_stands_for_no_residual(shape):
    assert tokens.read(np.zeros(shape, np.int64)) == 0


BROKEN = {
    "one row": lambda a, b: a[0],
    "some rows": lambda a, b: a[:2],
    "another order": lambda a, b: a[::-1],
    "a row twice": lambda a, b: a[[0, 0, 2]],
    "rows of two batches": lambda a, b: np.concatenate([a[:2], b[2:]]),
    "two evaluations": lambda a, b: np.stack([tokens.keep(Residual(), ()) for _ in range(2)]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_are_no_batch_are_refused(name):
    kept = tokens.keep(Residual(), (3,)), tokens.keep(Residual(), (3,))
    for reader in (tokens.read,) if name == "rows of two batches" else (tokens.read, tokens.parts):
        with pytest.raises(polybridge.ResidualError, match="not evaluated as this batch"):
            reader(BROKEN[name](*kept))


def test_rows_of_several_batches_are_told_apart():
    """The third example came to no call."""
    one, other = tokens.keep(Residual(), (4,)), tokens.keep(Residual(), (4,))
    mixed = np.stack([one[0], other[1], np.zeros(2, np.int64), one[3]])
    found = [(part.number, part.rows.tolist()) for part in tokens.parts(mixed)]
    assert found == [(one[0, 0], [True, False, False, True]), (other[0, 0], [False, True, False, False])]


def test_a_number_shows_whose_residual_it_is():
    number = residuals.stash(Residual(), [], None, owner=5)
    assert residuals.owner(number) == 5
    token = np.zeros((3, tokens.SIZE), np.int64)
    tokens.write(token, number)
    assert [part.number for part in tokens.parts(token)] == [number]
