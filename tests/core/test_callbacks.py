"""Asks that Python on a framework's thread runs as the thread did that traced it."""

import contextlib
import contextvars
import threading

import numpy as np
import pytest
import torch
from polybridge_toy.backend import ToyBackend

import polybridge
from polybridge.core.callbacks import as_caller

setting = contextvars.ContextVar("setting", default="default")


def on_a_thread(fn, *args):
    """Return `fn(*args)` from another thread, or raise what it raises."""
    found = []

    def run():
        try:
            found.append((fn(*args), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


class Stateful(ToyBackend):
    """A toy with one thread-local value."""

    current = threading.local()

    def state(self):
        captured = getattr(self.current, "value", None)

        @contextlib.contextmanager
        def entered():
            self.current.value = captured
            yield

        return entered


def test_context_variables_follow(backend):
    token = setting.set("mine")
    call = as_caller(backend)
    setting.reset(token)
    assert on_a_thread(call, setting.get) == "mine"


def test_the_backends_state_follows():
    backend = Stateful()
    backend.current.value = "mine"
    call = as_caller(backend)
    assert on_a_thread(call, lambda: backend.current.value) == "mine"


def test_a_callback_may_run_many_times_and_on_many_threads_at_once(backend):
    """A context can be entered by one thread at a time, so each call has a copy."""
    call = as_caller(backend)
    assert on_a_thread(call, on_a_thread, call, lambda: "nested") == "nested"


def test_arguments_and_results_pass_through(backend):
    assert as_caller(backend)(divmod, 7, 2) == (3, 1)


def test_what_a_callback_raises_is_remembered(backend):
    call = as_caller(backend)
    with pytest.raises(ZeroDivisionError) as caught:
        on_a_thread(call, lambda: 1 / 0)
    assert polybridge.last_error() is caught.value


def times_one(number):
    """Return a number times 1, as the processor has it now."""
    return float(np.float32(number) * np.float32(1))


@pytest.mark.parametrize("raises", [False, True])
def test_denormal_numbers_are_computed_with_where_the_thread_flushes_them(backend, raises):
    call = as_caller(backend)

    def computing():
        found.append(times_one(1e-40))
        if raises:
            raise KeyError

    found = []
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        with contextlib.suppress(KeyError):
            call(computing)
        found.append(times_one(1e-40))
    finally:
        torch.set_flush_denormal(False)
    assert found == [pytest.approx(1e-40, rel=1e-3), 0.0]


def test_denormal_numbers_are_computed_with_where_the_thread_does_not_flush_them(backend):
    assert as_caller(backend)(times_one, 1e-40) > 0
    assert times_one(1e-40) > 0
