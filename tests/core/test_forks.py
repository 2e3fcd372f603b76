"""Asks that a forked child refuses what had started in its parent, and only that."""

import os

import pytest
import toy

import polybridge
from polybridge.core import forks
from tests.core.fakes import FakeBackend, register

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_child(call) -> str:
    """Return what `call()` returns, or raises, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(call())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.fixture
def fake(monkeypatch):
    return register(monkeypatch, FakeBackend("fake"))


@pytest.fixture(autouse=True)
def nothing_else_has_started(monkeypatch):
    """Other tests of this session may have started real frameworks."""
    from polybridge.core.registry import registry

    monkeypatch.setattr(registry, "loaded", {n: b for n, b in registry.loaded.items() if n in ("toy", "fake")})


def test_a_child_runs_what_had_not_started(fake):
    f = polybridge.wrap(lambda x: x + 1, src="toy", dst="fake")
    assert in_child(lambda: f(fake.full(1.0)).value.tolist()) == "[2.0, 2.0]"


def test_a_child_refuses_what_had_started(fake):
    fake.started = lambda: True
    f = polybridge.wrap(lambda x: x + 1, src="toy", dst="fake")
    answer = in_child(lambda: f(fake.full(1.0)))
    assert answer.startswith(
        "ForkError: `<lambda> (src='toy', dst='fake')` was called in a forked process, but fake had"
    )
    assert '"spawn" or "forkserver"' in answer


def test_a_derivative_is_refused_too(fake):
    fake.started = lambda: True
    f = polybridge.wrap(lambda x: x, src="fake", dst="toy")
    assert in_child(lambda: toy.grad(lambda x: f(x))(toy.array(1.0))).startswith("ForkError")


def test_a_pullback_from_before_the_fork_is_refused(fake):
    f = polybridge.wrap(lambda x: x, src="fake", dst="toy")
    one = toy.array(1.0)
    _, pullback = toy.vjp(lambda x: [f(x)], [one])
    fake.started = lambda: True
    assert in_child(lambda: pullback([one])).startswith("ForkError")


def test_a_grandchild_is_refused_too(fake):
    fake.started = lambda: True
    f = polybridge.wrap(lambda x: x + 1, src="toy", dst="fake")
    assert "ForkError" in in_child(lambda: in_child(lambda: f(fake.full(1.0))))


def test_the_parent_goes_on(fake):
    fake.started = lambda: True
    f = polybridge.wrap(lambda x: x + 1, src="toy", dst="fake")
    in_child(lambda: None)
    assert f(fake.full(1.0)).value.tolist() == [2.0, 2.0]


def test_outside_a_child_the_check_passes():
    assert forks.check("f") is None
