"""Asks the conformance suite whether it would notice: for each law there is a backend that breaks it."""

import contextlib
import threading

import numpy as np
import pytest
import torch
import toy
from polybridge_toy.backend import ToyBackend, crossing

import polybridge
from polybridge import TensorSpec
from polybridge.backends.torch.backend import TorchBackend
from polybridge.testing import LAWS, Example, LawError, Subject, check_backend

OFFER = Example(lambda x, w: (toy.sin(x) * w, (x**3).sum()), [np.array([0.5, 1.5]), np.array(2.0)], "an offer")


def toy_with(**methods):
    """Return a toy backend with other methods or facts."""
    return type("Broken", (ToyBackend,), methods)()


def torch_with(**methods):
    """Return a torch backend with other methods or facts."""
    return type("Broken", (TorchBackend,), methods)()


def with_pullback(make):
    """Return a toy backend whose pullbacks are `make(outputs, pullback)`."""

    def vjp(self, fn, primals):
        outputs, pullback = toy.vjp(fn, primals)
        return outputs, make(outputs, pullback)

    return toy_with(vjp=vjp)


def detached(self, fn, primals):
    """A vjp that cannot be differentiated, as that of a framework without higher orders."""
    outputs, pullback = toy.vjp(fn, [toy.Array(x.value) for x in primals])
    return [toy.Array(y.value) for y in outputs], lambda cts: [ct and toy.Array(ct.value) for ct in pullback(cts)]


def scribbling(self, fn, primals):
    """A vjp that writes to its primals."""
    for x in primals:
        x.value = x.value + 1.0
    return toy.vjp(fn, primals)


def once(outputs, pullback):
    """A pullback that frees what it needs."""
    calls = []

    def pull(cts):
        calls.append(cts)
        if len(calls) > 1:
            raise RuntimeError("freed")
        return pullback(cts)

    return pull


def on_one_thread(outputs, pullback):
    """A pullback that only its own thread may call."""
    owner = threading.get_ident()

    def pull(cts):
        if threading.get_ident() != owner:
            raise RuntimeError("another thread")
        return pullback(cts)

    return pull


class Forgetful(polybridge.Pullback):
    """A pullback that takes None for one."""

    def __init__(self, outputs, pullback):
        self.outputs, self.pullback = outputs, pullback

    def __call__(self, cts):
        ones = [toy.Array(np.ones(y.shape)) for y in self.outputs]
        return self.pullback([one if ct is None else ct for ct, one in zip(cts, ones, strict=True)])

    def vjp(self, cts):
        raise NotImplementedError


class Shifted(polybridge.Pullback):
    """A pullback whose own pullback forgets the cotangents."""

    def __init__(self, outputs, pullback):
        self.pullback = pullback

    def __call__(self, cts):
        return self.pullback(cts)

    def vjp(self, cts):
        return self(cts), lambda others: [None] * len(cts)


def by_identity(self, fn, primals):
    """A vjp that tells primals apart by the arrays that they are."""
    inputs = {id(x): toy.Array(x.value, toy.Node([x], 1, lambda cts: cts)) for x in primals}
    with toy._recording():
        outputs = list(fn(*[inputs[id(x)] for x in primals]))
    return outputs, lambda cts: toy._backward(outputs, [inputs[id(x)] for x in primals], cts)


def by_last_output(outputs, pullback):
    """A pullback that keeps one cotangent for each output object."""

    def pull(cts):
        latest = {id(y): ct for y, ct in zip(outputs, cts, strict=True)}
        positions = {id(y): i for i, y in enumerate(outputs)}
        return pullback([latest[id(y)] if positions[id(y)] == i else None for i, y in enumerate(outputs)])

    return pull


class Refuses(polybridge.Pullback):
    """A pullback that is zero where an output is a primal."""

    def __init__(self, outputs, pullback):
        self.outputs, self.pullback = outputs, pullback

    def __call__(self, cts):
        leaf = [y.node is not None and y.node.inputs and y.node.inputs[0].node is None for y in self.outputs]
        return self.pullback([None if skip else ct for skip, ct in zip(leaf, cts, strict=True)])

    def vjp(self, cts):
        raise NotImplementedError


def without_integers(relay):
    def native(*xs):
        outcome = relay(xs)
        return polybridge.Outcome(outcome.leaves, outcome.structure, (True,) * len(outcome.leaves))

    return native


def constant(relay):
    """A native function that nobody differentiates."""
    return lambda *xs: relay(xs)


def impatient(relay):
    """A native function that does not take an absent cotangent."""

    def native(*xs):
        outcome = crossing(relay, xs)
        node = outcome.leaves[0].node
        if node is not None:
            pull = node.pullback
            node.pullback = lambda cts: pull([ct + 0 if ct is None else ct for ct in cts])
        return outcome

    return native


def entered_once(self):
    """A state that can be entered only once."""

    @contextlib.contextmanager
    def context():
        yield

    entered = context()
    return lambda: entered


BROKEN = {
    "has_a_name": toy_with(aliases=("toy",)),
    "tells_its_tensors": toy_with(is_tensor=lambda self, value: isinstance(value, (toy.Array, float))),
    "tensors_round_trip": toy_with(from_numpy=lambda self, array: toy.array(array + np.zeros((), array.dtype))),
    "takes_any_layout": toy_with(from_numpy=lambda self, array: toy.Array(np.frombuffer(array.data, array.dtype))),
    "from_numpy_copies": toy_with(from_numpy=lambda self, array: toy.Array(array)),
    "spec_tells_shape_and_dtype": toy_with(spec=lambda self, x: TensorSpec(x.shape, x.dtype.str)),
    "is_differentiable_as_its_dtype": toy_with(is_differentiable=lambda self, x: x.dtype.kind == "f"),
    "dense_keeps_dense_tensors": toy_with(dense=lambda self, x: toy.Array(x.value)),
    "copy_has_memory_of_its_own": toy_with(copy=lambda self, x: toy.Array(x.value)),
    "reference_has_the_same_values": toy_with(reference=lambda self, x: toy.Array(np.zeros_like(x.value))),
    "dlpack_shares_memory": torch_with(to_dlpack=lambda self, x: TorchBackend.to_dlpack(self, x.clone())),
    "exports_what_is_dense": torch_with(export=lambda self, x: TorchBackend.export(x.clone())),
    "adopts_the_memory_of_an_array": toy_with(adopt=lambda self, array: toy.array(array)),
    "a_capsule_keeps_its_memory": torch_with(
        to_dlpack=lambda self, x: id(x), from_dlpack=lambda self, capsule: torch.zeros(1)
    ),
    "allocates_as_it_asks": torch_with(
        copy=lambda self, x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:], alignment=64
    ),
    "owns_only_what_is_proved": torch_with(owns=lambda self, x: True),
    "version_tells_writes": torch_with(version=lambda self, x: 0),
    "same_compares_bytes": torch_with(same=lambda self, a, b: torch.equal(a, b)),
    "run_returns_what_it_runs": toy_with(run=lambda self, fn: (fn(), None)[1]),
    "decorate_changes_nothing": toy_with(decorate=lambda self, function: lambda *args: function(*args)),
    "state_can_be_entered_anywhere": toy_with(state=entered_once),
    "placeholders_have_their_specs": toy_with(
        placeholders=lambda self, specs: ([toy.array(np.ones(s.shape)) for s in specs], contextlib.nullcontext)
    ),
    "vjp_evaluates": toy_with(vjp=scribbling),
    "pullbacks_are_the_transposed_derivative": with_pullback(
        lambda ys, pull: lambda cts: [c and -c for c in pull(cts)]
    ),
    "vjp_inside_vjp_is_differentiable": toy_with(vjp=detached),
    "pullbacks_may_be_repeated": with_pullback(once),
    "pullbacks_keep_what_they_need": with_pullback(on_one_thread),
    "absent_cotangents_are_zero": with_pullback(Forgetful),
    "pullbacks_have_pullbacks": with_pullback(Shifted),
    "unused_primals_have_no_influence": with_pullback(
        lambda ys, pull: lambda cts: [toy.array(1.0) if c is None else c for c in pull(cts)]
    ),
    "one_tensor_may_be_two_primals": toy_with(vjp=by_identity),
    "outputs_may_be_primals": with_pullback(Refuses),
    "outputs_may_repeat": with_pullback(by_last_output),
    "placeholders_run": toy_with(
        placeholders=lambda self, specs: ([toy.array([1.0]) for _ in specs], contextlib.nullcontext)
    ),
    "native_functions_have_the_values": toy_with(wrap_as_native=lambda self, relay: without_integers(relay)),
    "native_functions_have_the_derivatives": toy_with(wrap_as_native=lambda self, relay: constant(relay)),
    "native_functions_pass_absent_cotangents": toy_with(wrap_as_native=lambda self, relay: impatient(relay)),
}


def test_every_law_has_a_backend_that_breaks_it():
    assert list(BROKEN) == [law.__name__ for law in LAWS]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_broken_law_is_noticed(law):
    with pytest.raises(LawError, match=rf"breaks `{law.__name__}`\. The law: .* Found: "):
        law(Subject(BROKEN[law.__name__], [OFFER], write=lambda x: x.add_(1)))


def test_a_sound_backend_passes_every_law():
    check_backend(ToyBackend(), [OFFER])


def test_all_broken_laws_are_in_one_error():
    with pytest.raises(LawError) as caught:
        check_backend(toy_with(aliases=("toy",), run=lambda self, fn: None), [OFFER])
    assert "`has_a_name`" in str(caught.value)
    assert "`run_returns_what_it_runs`" in str(caught.value)


def test_a_law_of_derivatives_names_the_example():
    with pytest.raises(LawError, match="This is of an offer"):
        LAWS[-1](Subject(BROKEN[LAWS[-1].__name__], [OFFER]))


def test_an_unexpected_exception_is_a_broken_law_and_its_cause():
    def fail(self, tensor):
        raise OSError("no device")

    with pytest.raises(LawError, match="OSError: no device") as caught:
        check_backend(toy_with(to_numpy=fail), [OFFER])
    assert isinstance(caught.value.__cause__.__cause__, OSError)


def test_a_backend_is_judged_on_the_dtypes_that_it_holds():
    def picky(self, array):
        assert array.dtype.name in ("float32", "float64", "int32")
        return toy.array(array)

    check_backend(toy_with(from_numpy=picky), [OFFER], dtypes=["float32", "float64", "int32"])


def test_a_backend_that_counts_writes_has_to_be_written_to():
    with pytest.raises(LawError, match="give `write=`"):
        check_backend(toy_with(counts_writes=True, version=lambda self, x: 0), [OFFER])
