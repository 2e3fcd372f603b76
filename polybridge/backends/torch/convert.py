"""torch tensors in and out: dtypes, strides, lazy conjugation, ownership, DLPack, NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from torch._C import _from_dlpack  # private, see `from_dlpack`
from torch._subclasses.fake_tensor import FakeTensor  # private, as in source.py
from torch.utils.dlpack import to_dlpack as _to_dlpack

from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.specs import BFLOAT16, DIFFERENTIABLE, SUPPORTED, TensorSpec

ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = (*ORDINARY, FakeTensor)
_STRIDED = torch.strided
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in SUPPORTED if hasattr(torch, name)}


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Return shape and dtype."""
    name = dtype_name(tensor)
    return TensorSpec(tuple(tensor.shape), name)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the NumPy name of the dtype.

    Raises:
        UnsupportedTensorError: sparse, nested and meta tensors, those without memory of their own such as DTensors;
            quantised, float8 and other dtypes that no other framework holds.
    """
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__") and not _is_awaited(tensor):
        kind = type(tensor).__name__
        hint = "pass .full_tensor(), or .to_local() for the part of this process" if kind == "DTensor" else "unwrap it"
        raise UnsupportedTensorError(f"a {kind}, which has no memory of its own; {hint}")
    if tensor.layout is not _STRIDED or tensor.is_nested:
        raise UnsupportedTensorError(f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}")
    if tensor.is_meta and type(tensor) is not FakeTensor:
        raise UnsupportedTensorError("a meta tensor, which has no values")
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedTensorError(f"a tensor of dtype {tensor.dtype}")
    return name


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether it is floating or complex.

    Raises:
        UnsupportedTensorError: as `dtype_name`.
    """
    return dtype_name(tensor) in DIFFERENTIABLE


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a NumPy name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def empty(shape: Sequence[Any], name: str) -> torch.Tensor:
    """Return a tensor of a NumPy name's dtype that nobody has filled, on the CPU whatever torch's default device is."""
    return torch.empty(tuple(shape), dtype=torch_dtype(name), device="cpu")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major tensor without lazy conjugation or negation, the same object where it is one.

    Raises:
        UnsupportedTensorError: as `dtype_name`, and fake tensors and others without memory, such as masked ones.
    """
    dtype_name(tensor)
    if type(tensor) is FakeTensor:
        raise UnsupportedTensorError(
            "a fake tensor, which has no values; the function has kept it from a run that traced it into a graph (with "
            "`output_specs=` given to `polybridge.wrap`, tracing does not run the function)"
        )
    if type(tensor) not in _PLAIN:
        if _is_awaited(tensor):
            return dense(cast(Any, tensor.detach()).wait())
        if tensor.numel() and not tensor.data_ptr():
            raise UnsupportedTensorError(f"a {type(tensor).__name__}, which has no memory of its own; unwrap it")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _is_awaited(tensor: torch.Tensor) -> bool:
    """Whether it is the result of a collective that may still be running."""
    return type(tensor).__name__ == "AsyncCollectiveTensor"


def lasting(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter, or a copy if somebody else holds its memory and may free it before the backward comes.

    FSDP does so, and gathers the values again for the backward: in torch's own graph they are then where they were, but
    what another framework has saved would point into memory that was freed.
    """
    return parameter.clone() if torch.is_grad_enabled() and is_distributed() and not owns(parameter) else parameter


def places(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int] | None]:
    """Return for each tensor its storage and where that is."""
    return [None if x is None else (x.untyped_storage()._cdata, x.untyped_storage().data_ptr()) for x in tensors]


def are_freed(before: Sequence[tuple[int, int] | None], tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a storage has been freed, and perhaps filled again elsewhere, since `places` saw it."""
    return any(
        b is not None and n is not None and b[0] == n[0] and b[1] != n[1]
        for b, n in zip(before, places(tensors), strict=True)
    )


# Private: what `torch.distributed.is_initialized` asks, in four calls, is `_world.default_pg` (torch 2.13).
_distributed = torch.distributed.distributed_c10d if torch.distributed.is_available() else None


def is_distributed() -> bool:
    """Whether there are other processes, which may free memory of weights between forward and backward."""
    return _distributed is not None and _distributed._world.default_pg is not None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter, gathered from all processes if it is spread over them."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def spread_like(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return values that are spread over processes as a parameter is."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor  # imported by whoever made the parameter, and slow to import

    spread: torch.Tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return spread


def to_dlpack(tensor: torch.Tensor) -> Any:
    """Return a capsule on the memory of a dense tensor."""
    return _to_dlpack(tensor.detach())  # a tensor of its own, so that `owns` sees the capsule


def export(tensor: torch.Tensor) -> Any:
    """Return a capsule on the memory of an ordinary dense tensor; None for one that `dense` has to look at."""
    if (
        type(tensor) in ORDINARY
        and tensor.dtype in _NAMES
        and tensor.layout is _STRIDED
        and not (tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    ):
        return _to_dlpack(tensor.detach())


from_dlpack = _from_dlpack  # private: the public one takes objects too, and asks first (torch 2.13)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the values, as a view where they are in CPU memory."""
    tensor = dense(tensor)
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:  # NumPy has none of its own; the bits are the same
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with a copy of the values, row-major and in native byte order."""
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    return _of(np.array(array, native, order="C"))


def adopt(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor on the array's memory, if that is row-major, aligned, writable and in native byte order."""
    return _of(array) if array.flags.carray and array.dtype.isnative else None


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy that derivatives pass through."""
    return tensor.clone(memory_format=torch.contiguous_format)


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor on the same storage."""
    return tensor.detach()


def owns(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, saved residual or exported capsule refers to the storage, and torch allocated it."""
    storage = tensor.untyped_storage()
    return storage.resizable() and _uses(storage) <= _USES_OF_ONE


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes (NaN equals itself, 0.0 is not -0.0)."""
    if a.is_contiguous() and b.is_contiguous():
        return torch.equal(_bytes(a), _bytes(b))
    return torch.equal(_bits(a), _bits(b))


def _of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of any layout as integers."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a dense tensor may have any stride where its size is 1
    return flat.view(torch.uint8)


def _uses(storage: torch.UntypedStorage) -> int:
    # Private: torch has no public count of a storage's users (torch 2.13; its CUDA graph trees use this one).
    # `tests/backends/test_private_apis.py` notices a change.
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


_ONE = torch.empty(1)  # has to be alive when it is counted
_USES_OF_ONE = _uses(_ONE.untyped_storage())
