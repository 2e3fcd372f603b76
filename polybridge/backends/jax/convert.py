"""JAX arrays in and out: dtypes, layouts, 64 bits that are off, ownership, DLPack, NumPy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import eval_trace as _EVALUATION  # private, see `is_tracing`
from jax._src.core import trace_state_strong_ref as _trace
from jax._src.lib import _jax  # private, see `from_dlpack`
from jax._src.xla_bridge import backends_are_initialized as started  # private: JAX has no public one (0.10)
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from polybridge.core.backend import Narrowing
from polybridge.core.errors import PrecisionWarning, UnsupportedTensorError, warn
from polybridge.core.specs import DIFFERENTIABLE, SUPPORTED, TensorSpec, dtype

__all__ = ["started"]

_NAMES = {dtype(name): name for name in SUPPORTED}
_NARROWER = {
    "float64": "float32",
    "complex128": "complex64",
    "int64": "int32",
    "uint64": "uint32",
}
_WIDE, _NOTHING = frozenset(_NARROWER), frozenset[str]()


def is_tensor(value: Any) -> bool:
    """Whether it is an array, or traced: a traced reference has the type of a traced array."""
    return isinstance(value, (jax.Array, jax.core.Tracer))


def is_composite(value: Any) -> bool:
    """Whether it is a mutable reference, or a tree of arrays that JAX has been taught alone, such as a sparse one."""
    if isinstance(value, jax.Ref):
        return True
    return is_tree(value) and any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def is_tree(value: Any) -> bool:
    """Whether JAX has been taught what is in it."""
    return not jax.tree_util.all_leaves([value])


def spec(tensor: jax.Array) -> TensorSpec:
    """Return shape and dtype."""
    return TensorSpec(tensor.shape, dtype_name(tensor))


def dtype_name(tensor: jax.Array) -> str:
    """Return the NumPy name of the dtype.

    Raises:
        UnsupportedTensorError: mutable references, typed PRNG keys, float8, int4 and other dtypes that no other
            framework holds.
    """
    if isinstance(tensor, jax.core.Tracer) and not isinstance(tensor, jax.Array):
        raise UnsupportedTensorError("a mutable reference, whose value is not an array; return ref[...]")
    name = _NAMES.get(tensor.dtype)
    if name is not None:
        return name
    if jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key):
        raise UnsupportedTensorError("a typed PRNG key; pass jax.random.key_data(key), and wrap it there again")
    raise UnsupportedTensorError(f"a tensor of dtype {tensor.dtype}")


def is_differentiable(tensor: jax.Array) -> bool:
    """Whether it is floating or complex.

    Raises:
        UnsupportedTensorError: as `dtype_name`.
    """
    return dtype_name(tensor) in DIFFERENTIABLE


def dense(tensor: jax.Array) -> jax.Array:
    """Return a row-major array, the same object where it is one.

    Raises:
        UnsupportedTensorError: as `dtype_name`, and arrays that are traced, deleted or spread over several devices.
    """
    if hasattr(tensor, _OWNED):
        return tensor
    dtype_name(tensor)
    if not isinstance(tensor, jax.Array):  # a buffer of XLA, where compiled code differentiates what ran before it
        return jnp.asarray(np.asarray(tensor).copy())
    if isinstance(tensor, jax.core.Tracer):
        raise UnsupportedTensorError("a traced array, which has no values")
    if tensor.is_deleted():
        raise UnsupportedTensorError("an array that has been deleted or donated")
    if tensor.sharding.num_devices > 1:
        if not (tensor.is_fully_addressable or tensor.is_fully_replicated):
            raise UnsupportedTensorError("an array that is spread over the devices of several processes")
        return jnp.asarray(np.asarray(tensor))  # gathered
    if tensor.ndim > 1 and not _is_row_major(tensor):
        return copy(tensor)
    return tensor


def _is_row_major(tensor: jax.Array) -> bool:
    layout = tensor.format.layout
    return layout is None or layout.major_to_minor == tuple(range(tensor.ndim))


def to_dlpack(tensor: jax.Array) -> Any:
    """Return a capsule on the memory of a dense array, once its values have been computed."""
    # Private, as below: `__dlpack__` takes four times as long for its options, which are not needed here.
    capsule = _jax.buffer_to_dlpack_managed_tensor(tensor, stream=None)
    _disown(tensor)
    return capsule


def export(tensor: jax.Array) -> Any:
    """Return a capsule on the memory of an array that is dense as it is; None for any other.

    Raises:
        UnsupportedTensorError: as `dense`.
    """
    return to_dlpack(tensor) if hasattr(tensor, _OWNED) or dense(tensor) is tensor else None


def release(tensor: jax.Array) -> Any:
    """Return a capsule on the memory of an array that `owns` has proved to be free, and is no longer; else None."""
    return to_dlpack(tensor) if hasattr(tensor, _OWNED) else None


def from_dlpack(capsule: Any) -> jax.Array:
    """Return an array on the memory of a capsule, which JAX copies where it is not aligned; narrowed where it must be.

    Raises:
        UnsupportedTensorError: integers that do not fit into 32 bits, while 64 bits are off.
    """
    # Private: `jax.dlpack.from_dlpack` takes an object and not a capsule, 17 us and not 3, and cuts 64 bits silently.
    # `tests/backends/test_private_apis.py` notices a change.
    array: jax.Array = _jax.dlpack_managed_tensor_to_buffer(capsule, _cpu(), None, None)
    return narrowed(array) if array.aval.dtype.itemsize >= 8 and narrows() else array


def to_numpy(tensor: jax.Array) -> np.ndarray[Any, Any]:
    """Return the values, as a view that cannot be written to."""
    tensor = dense(tensor)
    _disown(tensor)
    return np.asarray(tensor)


def from_numpy(array: np.ndarray[Any, Any]) -> jax.Array:
    """Return an array of a copy of the values, in native byte order.

    Raises:
        UnsupportedTensorError: as `from_dlpack`.
    """
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return jnp.asarray(narrowed(array) if narrows() else array)


def copy(tensor: jax.Array) -> jax.Array:
    """Return a row-major copy."""
    return jnp.array(np.array(tensor, order="C"))


def own(tensors: Iterable[jax.Array | None]) -> None:
    """Note that the memory of each array was made by compiled code, which shares none with what else it takes or gives.

    XLA copies what it would otherwise return twice, or return of its inputs and constants. On one device it is dense.
    """
    is_single = not _has_others()
    for tensor in tensors:
        if tensor is not None and (is_single or type(tensor.sharding) is SingleDeviceSharding):
            tensor._polybridge_owns = True


def owns(tensor: jax.Array) -> bool:
    """Whether `own` has noted it, and nobody has been given the memory since."""
    return hasattr(tensor, _OWNED)


def _disown(tensor: jax.Array) -> None:
    if hasattr(tensor, _OWNED):
        del tensor._polybridge_owns


_OWNED = "_polybridge_owns"


def place(inputs: Sequence[jax.Array]) -> Any:
    """Return the sharding that results of these inputs have: beside them, whole on each device.

    None stands for the CPU device on which everything that crosses arrives.
    """
    if not _has_others():
        return None
    shardings = [x.sharding for x in inputs if isinstance(x, jax.Array)]
    if not shardings:
        return None
    widest = max(shardings, key=lambda sharding: sharding.num_devices)
    if widest.num_devices == 1:
        return None if widest.device_set == {_cpu()} else widest
    mesh = widest.mesh if isinstance(widest, NamedSharding) else Mesh(np.array(list(widest.device_set)), "devices")
    return NamedSharding(mesh, PartitionSpec())


def placed(arrays: Sequence[jax.Array], where: Any) -> list[jax.Array]:
    """Return arrays in a `place`."""
    return list(arrays) if where is None else jax.device_put(list(arrays), where)


def looked_at(arrays: list[Any], call: str) -> list[Any]:
    """Return results of a call in which there is nothing that `jax.debug_nans` and `jax.debug_infs` are to find.

    JAX looks at what it has compiled, which an evaluation that runs at once is not.

    Raises:
        FloatingPointError: there is.
    """
    nans, infs = jax.debug_nans.value, jax.debug_infs.value
    if nans or infs:
        for values in (np.asarray(x) for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)):
            kind = "nan" if nans and np.isnan(values).any() else "inf" if infs and np.isinf(values).any() else None
            if kind is not None:
                raise FloatingPointError(f"invalid value ({kind}) encountered in {call}")
    return arrays


def is_tracing() -> bool:
    """Whether JAX is tracing on this thread."""
    # Private: `jax.extend.core.find_top_trace`, which is to be removed, goes the same way in four calls (JAX 0.10).
    return _trace.value is not _EVALUATION


def narrows() -> bool:
    """Whether 64 bits are off on this thread."""
    return not jax.enable_x64.value


class _To32Bits(Narrowing):
    def dtypes(self) -> frozenset[str]:
        return _WIDE if narrows() else _NOTHING


narrowing = _To32Bits()


def narrowed_dtype(name: str) -> str:
    """Return the dtype that an array of dtype `name` has here."""
    return _NARROWER.get(name, name) if narrows() else name


def narrowed(array: Any) -> Any:
    """Return an array of JAX or NumPy with 32 bits in place of 64.

    Raises:
        UnsupportedTensorError: integers that do not fit.
    """
    name = array.dtype.name
    if name not in _NARROWER:
        return array
    values, narrower = np.asarray(array), np.dtype(_NARROWER[name])
    if narrower.kind in "iu":
        limits = np.iinfo(narrower)
        if values.size and not (limits.min <= values.min() and values.max() <= limits.max):
            raise UnsupportedTensorError(
                f"a tensor of dtype {name} with values that do not fit into {narrower.name}, while JAX has 64 bits "
                f'switched off (`jax.config.update("jax_enable_x64", True)` switches them on)'
            )
    else:
        _tell_of_precision()
    narrowing.note()
    narrow = values.astype(narrower)
    return narrow if isinstance(array, np.ndarray) else jnp.asarray(narrow)


@functools.cache  # once a process, as it is switched for the process
def _tell_of_precision() -> None:
    warn(PrecisionWarning.in_jax())


@functools.cache
def _has_others() -> bool:
    return len(jax.devices()) > 1


@functools.cache
def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]
