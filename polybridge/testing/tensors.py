"""The laws of tensors: in and out through NumPy and DLPack, whose memory is whose, and what a run needs around it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np

from polybridge.core import dlpack
from polybridge.core.specs import TensorSpec
from polybridge.testing.subject import Array, Subject, law, require, require_same


@law
def has_a_name(subject: Subject) -> None:
    """`name` is a string, and `aliases` are others."""
    names = (subject.backend.name, *subject.backend.aliases)
    require(all(isinstance(name, str) and name for name in names), f"the names {names!r}.")
    require(len(set(names)) == len(names), f"the names {names!r}.")


@law
def tells_its_tensors(subject: Subject) -> None:
    """`is_tensor` is true of this framework's tensors, and of nothing else."""
    for array, tensor in subject.tensors():
        require(subject.backend.is_tensor(tensor) is True, f"that a {type(tensor).__name__} is none.")
        near: list[Any] = [[tensor], {"x": tensor}, type(tensor)]
        arrays = () if isinstance(tensor, np.ndarray) else (array, np.float32(1))
        for other in (*near, *arrays, None, 1, 1.0, True, "text", object()):
            require(subject.backend.is_tensor(other) is False, f"that {other!r} is one.")


@law
def tensors_round_trip(subject: Subject) -> None:
    """`to_numpy(from_numpy(x))` equals x bit for bit, in shape, dtype and value."""
    for array, tensor in subject.tensors():
        found = subject.backend.to_numpy(tensor)
        require(isinstance(found, np.ndarray), f"a {type(found).__name__} instead of a NumPy array.")
        require_same(found, array, "the tensor")
        require_same(subject.backend.to_numpy(tensor), array, "the tensor, looked at again,")


@law
def takes_any_layout(subject: Subject) -> None:
    """`from_numpy` takes strided, reversed, read-only, unaligned and byte-swapped arrays by their values."""
    for array in _layouts(np.arange(12, dtype="float32").reshape(3, 4)):
        require_same(subject.backend.to_numpy(subject.backend.from_numpy(array)), array, "the tensor")


@law
def from_numpy_copies(subject: Subject) -> None:
    """A tensor of `from_numpy` does not share the array's memory."""
    for array in subject.arrays():
        given = array.copy()
        tensor = subject.backend.from_numpy(given)
        given.reshape(-1).view(np.uint8)[:] ^= 0xFF if array.dtype != bool else 1
        require_same(subject.backend.to_numpy(tensor), array, "after a write to the array the tensor")


@law
def spec_tells_shape_and_dtype(subject: Subject) -> None:
    """`spec` returns shape and dtype."""
    for array, tensor in subject.tensors():
        promised = TensorSpec(array.shape, array.dtype.name)
        require(subject.backend.spec(tensor) == promised, f"{subject.backend.spec(tensor)} instead of {promised}.")


@law
def is_differentiable_as_its_dtype(subject: Subject) -> None:
    """`is_differentiable` is true of floating and complex tensors, and of no others."""
    for array, tensor in subject.tensors():
        promised = TensorSpec(array.shape, array.dtype.name)
        found = subject.backend.is_differentiable(tensor)
        require(found is promised.differentiable, f"{found!r} of a tensor of {promised}.")


@law
def dense_keeps_dense_tensors(subject: Subject) -> None:
    """`dense` returns the same values, and a row-major tensor itself."""
    for array, tensor in subject.tensors():
        dense = subject.backend.dense(tensor)
        require_same(subject.backend.to_numpy(dense), array, "the dense tensor")
        require(subject.backend.dense(dense) is dense, "that a dense tensor is made dense again.")


@law
def copy_has_memory_of_its_own(subject: Subject) -> None:
    """`copy` returns the same values in memory of its own."""
    for array, tensor in subject.tensors():
        copied = subject.backend.copy(tensor)
        require_same(subject.backend.to_numpy(copied), array, "the copy")
        shares = np.shares_memory(subject.backend.to_numpy(copied), subject.backend.to_numpy(tensor))
        require(not shares, "that the copy shares the tensor's memory.")
        if subject.write is not None and array.dtype == np.float32:
            subject.write(copied)
            require_same(subject.backend.to_numpy(tensor), array, "after a write to the copy the tensor")


@law
def reference_has_the_same_values(subject: Subject) -> None:
    """`reference` returns a tensor of the same values."""
    for array, tensor in subject.tensors():
        require_same(subject.backend.to_numpy(subject.backend.reference(tensor)), array, "the reference")


@law
def dlpack_shares_memory(subject: Subject) -> None:
    """Where `dlpack` is set, `from_dlpack(to_dlpack(dense(x)))` has the values of x and shares its memory."""
    backend = subject.backend
    for array, tensor in subject.tensors() if backend.dlpack else ():
        tensor = backend.dense(tensor)
        moved = backend.from_dlpack(backend.to_dlpack(tensor))
        require_same(backend.to_numpy(moved), array, "the tensor")
        addresses = [dlpack.address(backend.to_dlpack(x)) for x in (tensor, moved)]
        require(array.size == 0 or len(set(addresses)) == 1, f"a copy of a tensor of dtype {array.dtype.name}.")


@law
def exports_what_is_dense(subject: Subject) -> None:
    """`export` returns what `to_dlpack` does, or None."""
    backend = subject.backend
    for array, tensor in subject.tensors() if backend.dlpack else ():
        capsule = backend.export(tensor)
        if capsule is not None:
            same = array.size == 0 or dlpack.address(capsule) == dlpack.address(backend.to_dlpack(tensor))
            require(same, f"a capsule of other memory for a tensor of dtype {array.dtype.name}.")
            require_same(backend.to_numpy(backend.from_dlpack(capsule)), array, "the tensor")


@law
def adopts_the_memory_of_an_array(subject: Subject) -> None:
    """`adopt` returns a tensor of the array's values on its memory, or None."""
    for array in subject.arrays():
        given = array.copy()
        adopted = subject.backend.adopt(given)
        if adopted is not None and array.size:
            require_same(subject.backend.to_numpy(adopted), array, "the tensor")
            require(np.shares_memory(subject.backend.to_numpy(adopted), given), "a copy.")


@law
def a_capsule_keeps_its_memory(subject: Subject) -> None:
    """A capsule of `to_dlpack` outlives the tensor that it was made of."""
    backend = subject.backend
    arrays = list(subject.arrays()) if backend.dlpack else []
    capsules = [backend.to_dlpack(backend.dense(backend.from_numpy(array))) for array in arrays]
    gc.collect()
    for array, capsule in zip(arrays, capsules, strict=True):
        require_same(backend.to_numpy(backend.from_dlpack(capsule)), array, "the tensor")


@law
def allocates_as_it_asks(subject: Subject) -> None:
    """Memory that this framework allocates is aligned as its `alignment` asks of others."""
    backend = subject.backend
    for array, tensor in subject.tensors() if backend.dlpack else ():
        for found in (tensor, backend.copy(tensor)):
            off = dlpack.address(backend.to_dlpack(found)) % backend.alignment
            require(off == 0 or array.size == 0, f"an address {off} bytes off for {backend.spec(found)}.")


@law
def owns_only_what_is_proved(subject: Subject) -> None:
    """`owns` is false, and `release` returns None, while another tensor refers to the memory."""
    backend = subject.backend
    for array, tensor in subject.tensors() if backend.dlpack else ():
        other = backend.from_dlpack(backend.to_dlpack(backend.dense(tensor)))
        for x in (tensor, other) if array.size else ():
            owned = backend.owns(x) or backend.release(x) is not None
            require(not owned, f"that one of two tensors on a memory owns it ({backend.spec(other)}).")


@law
def version_tells_writes(subject: Subject) -> None:
    """Where `counts_writes` is set, `version` changes with every write to the memory, and with nothing else."""
    backend = subject.backend
    if not backend.counts_writes:
        return
    require(subject.write is not None, "no way to write: give `write=` to the check.")
    tensor = backend.from_numpy(np.ones(3, np.float32))
    other = backend.reference(tensor)
    before = backend.version(tensor)
    backend.to_numpy(tensor), backend.copy(tensor), backend.spec(tensor)
    require(backend.version(tensor) == before, "another version after a look.")
    for written in (tensor, other):
        before = backend.version(tensor)
        subject.write(written)  # type: ignore[misc]
        require(backend.version(tensor) != before, "the same version after a write.")


@law
def same_compares_bytes(subject: Subject) -> None:
    """Where `counts_writes` is set, `same` tells whether two tensors have the same bytes: nan is nan, 0 is not -0."""
    backend = subject.backend
    for array, tensor in subject.tensors() if backend.counts_writes else ():
        spec = backend.spec(tensor)
        require(backend.same(tensor, backend.from_numpy(array)) is True, f"that two equal tensors of {spec} differ.")
        if array.size:
            other = backend.from_numpy(_with_another_sign(array))
            require(backend.same(tensor, other) is False, f"that two different tensors of {spec} are the same.")


@law
def run_returns_what_it_runs(subject: Subject) -> None:
    """`run` returns what the function returns, and raises what it raises."""
    marker = object()
    require(subject.backend.run(lambda: marker) is marker, "another object.")
    raised = _Marked()

    def fail() -> None:
        raise raised

    try:
        subject.backend.run(fail)
    except Exception as error:
        require(error is raised, f"another exception: {error!r}.")
    else:
        require(False, "that no exception came out.")


@law
def decorate_changes_nothing(subject: Subject) -> None:
    """A function that `decorate` returns takes and gives the same."""
    decorated = subject.backend.decorate(lambda *args, **kwargs: (args, kwargs))
    require(decorated(1, "two", three=[3]) == ((1, "two"), {"three": [3]}), "something else.")


@law
def state_can_be_entered_anywhere(subject: Subject) -> None:
    """What `state` captures can be entered more than once, one inside the other, and on any thread."""
    enter, failures = subject.backend.state(), []

    def entered() -> None:
        try:
            with enter(), enter():
                subject.backend.from_numpy(np.ones(2, np.float32))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=entered)
    thread.start()
    thread.join()
    entered()
    require(not failures, f"{failures}.")


@law
def placeholders_have_their_specs(subject: Subject) -> None:
    """`placeholders` returns tensors of the specs; their context can be entered more than once."""
    specs = [TensorSpec(array.shape, array.dtype.name) for array in subject.arrays()]
    placeholders, running = subject.backend.placeholders(specs)
    for _ in range(2):
        with running():
            found = [subject.backend.spec(x) for x in placeholders]
        require(found == specs, f"{found} instead of {specs}.")


class _Marked(Exception):
    """What only a law raises."""


def _with_another_sign(array: Array) -> Array:
    """Return the array with another sign bit in its last element."""
    changed = array.copy()
    last = changed.reshape(-1).view(np.uint8)[-1:]
    last ^= 1 if array.dtype == bool else 0x80
    return changed


def _layouts(array: Array) -> list[Array]:
    """Return arrays of every kind of memory that NumPy knows."""
    frozen = array.copy()
    frozen.flags.writeable = False
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    swapped = array.astype(array.dtype.newbyteorder())
    broadcast = np.broadcast_to(array[:1], array.shape)
    return [array.T, array[::2, 1::2], array[::-1], frozen, unaligned, swapped, broadcast, array[:, :1]]
