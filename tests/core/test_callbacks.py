"""Asks that Python on a framework's thread runs as the thread did that traced it."""

import contextlib
import contextvars
import threading

import numpy as np
import pytest
from polybridge_toy.backend import ToyBackend

import polybridge
from polybridge.core.callbacks import Denormals, as_caller

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


def test_denormal_numbers_stay_what_they_are():
    with Denormals():
        assert np.float32(1e-40) * np.float32(1) > 0
