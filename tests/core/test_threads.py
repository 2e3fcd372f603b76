"""Asks that a thread's value is its own, and is what it was before once the call that set it is over."""

import threading

import pytest

from polybridge.core.threads import PerThread


def test_each_thread_has_its_own():
    value, seen = PerThread(0), []
    with value.set(1):
        thread = threading.Thread(target=lambda: seen.append(value.value))
        thread.start()
        thread.join()
        assert (value.value, seen) == (1, [0])
    assert value.value == 0


def test_it_is_set_back_by_an_exception_and_from_within():
    value = PerThread("none")
    with pytest.raises(KeyboardInterrupt), value.set("outer"):
        with value.set("inner"):
            assert value.value == "inner"
        assert value.value == "outer"
        raise KeyboardInterrupt
    assert value.value == "none"
