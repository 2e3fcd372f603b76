"""torch under the names of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.pairs.dialects import Array, Dialect, Fn, cotangent, sample


class Torch(Dialect):
    """torch's own tensors, autograd and operations."""

    name = "torch"
    writes = True
    sin = staticmethod(torch.sin)
    cos = staticmethod(torch.cos)
    exp = staticmethod(torch.exp)
    tanh = staticmethod(torch.tanh)
    sqrt = staticmethod(torch.sqrt)
    abs = staticmethod(torch.abs)
    square = staticmethod(torch.square)
    maximum = staticmethod(torch.maximum)
    where = staticmethod(torch.where)
    real = staticmethod(torch.real)
    imag = staticmethod(torch.imag)
    conj = staticmethod(torch.conj)
    complex = staticmethod(torch.complex)
    zeros_like = staticmethod(torch.zeros_like)
    reshape = staticmethod(torch.reshape)
    copy = staticmethod(torch.clone)

    def identity(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def stop_gradient(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1)

    def tensor(self, values: Any, dtype: str | None = None) -> torch.Tensor:
        if isinstance(values, (np.ndarray, np.generic)):
            array = np.array(values)
            is_bfloat16 = array.dtype == ml_dtypes.bfloat16
            return (
                torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)
            )
        return torch.tensor(values, dtype=None if dtype is None else getattr(torch, dtype))

    def numpy(self, tensor: torch.Tensor) -> Array:
        tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def dtype(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def parameter(self, values: Any) -> torch.Tensor:
        return torch.nn.Parameter(self.tensor(values))

    def layouts(self) -> dict[str, torch.Tensor]:
        x = torch.from_numpy(sample((6, 8)))
        cube = torch.from_numpy(sample((2, 3, 4, 5)))
        z = torch.from_numpy(sample((5, 3), "complex64"))
        return {
            "contiguous": x.clone(),
            "scalar": torch.tensor(0.5),
            "empty": torch.empty(0),
            "empty_matrix": torch.empty(3, 0),
            "size_one": torch.tensor([[[0.5]]]),
            "row": x[1],
            "element": x[1, 3],
            "element_of_a_vector": x[0].clone()[1],
            "tail": x[1:],
            "tail_of_a_vector": x[0].clone()[1:],
            "chunk": x.split(4)[1],
            "chunk_of_a_vector": torch.from_numpy(sample((9,))).split(3)[1],
            "column": x[:, 2],
            "every_second": x[::2, 1::3],
            "transposed": x.T,
            "permuted": cube.permute(2, 0, 3, 1),
            "channels_last": cube.to(memory_format=torch.channels_last),
            "diagonal": x.diagonal(),
            "expanded_scalar": torch.tensor(0.5).expand(4),
            "expanded_row": x[2, :3].expand(4, 3),
            "expanded_column": x[:3, :1].expand(3, 5),
            "overlapping_windows": x[0].clone().unfold(0, 3, 1),
            "size_one_with_odd_strides": torch.as_strided(x.clone(), (1, 3), (999, 1), 5),
            "flipped": x.flip(0),
            "from_numpy": torch.from_numpy(sample((101,))),
            "from_numpy_transposed": torch.from_numpy(sample((3, 4)).T),
            "from_buffer_at_4_bytes": torch.frombuffer(
                bytearray(sample((9,)).tobytes()), dtype=torch.float32, offset=4
            ),
            "real_view": z.real,
            "imag_view": z.imag,
            "lazily_negative": z.conj().imag,
            "lazily_negative_element": z.conj().imag[1, 2],
            "parameter": torch.nn.Parameter(x.clone()),
            "buffer": torch.nn.Buffer(x.clone()),
            "result_of_a_graph": torch.nn.Parameter(x.clone()) * 2,
            "inside_a_graph_and_transposed": (torch.nn.Parameter(x.clone()) * 2).T,
        }

    def vjp(
        self, fn: Fn, xs: Sequence[torch.Tensor], cts: Sequence[Array] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]]:
        primals = [x if x.requires_grad or not _differentiable(x) else x.detach().requires_grad_() for x in xs]
        found = fn(*primals)
        ys = [found] if isinstance(found, torch.Tensor) else list(found)
        outputs = [y for y in ys if _differentiable(y)]
        cts = [cotangent(y.shape, self.dtype(y)) for y in outputs] if cts is None else cts
        pairs = [(y, self.tensor(ct)) for y, ct in zip(outputs, cts, strict=True) if y.requires_grad]
        wanted = [x for x in primals if x.requires_grad]
        if not pairs or not wanted:
            return ys, [None] * len(xs)
        ends, seeds = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
        return ys, [next(gradients) if x.requires_grad else None for x in primals]

    def derivative(self, fn: Fn) -> Fn:
        def derived(x: torch.Tensor) -> torch.Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

        return derived

    def sum(self, x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
        return torch.sum(x) if axis is None else torch.sum(x, dim=axis)

    def max(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.amax(x, dim=axis)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(x)

    def cumsum(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.cumsum(x, dim=axis)

    def transpose(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.permute(tuple(axes))

    def concat(self, xs: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(xs), dim=axis)

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x[indices]

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.to(getattr(torch, dtype))


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


DIALECT = Torch()
