"""The same functions in every source, and in torch itself for the expected values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
import torch
import toy

import polybridge

Fn = Callable[..., Any]

TORCH = SimpleNamespace(
    name="torch",
    sin=torch.sin,
    exp=torch.exp,
    conj=torch.conj,
    matmul=torch.matmul,
    sum=torch.sum,
    rows=lambda x: torch.sum(x, -1),
    count=lambda x: torch.tensor([3, 4]),
)
TENSORFLOW = SimpleNamespace(
    name="tensorflow",
    sin=tf.sin,
    exp=tf.exp,
    conj=tf.math.conj,
    matmul=lambda a, b: tf.linalg.matvec(a, b) if b.shape.rank == 1 else tf.matmul(a, b),
    sum=tf.reduce_sum,
    rows=lambda x: tf.reduce_sum(x, -1),
    count=lambda x: tf.constant([3, 4], tf.int64),
)
TOY = SimpleNamespace(  # has no vectorisation and no pullback of a pullback: everything by the defaults
    name="toy",
    sin=toy.sin,
    exp=toy.exp,
    conj=toy.conj,
    matmul=lambda a, b: toy.matmul(a, b.reshape(*b.shape, 1)).reshape(a.shape[0]) if b.shape[1:] == () else a @ b,
    sum=lambda x: x.sum(),
    rows=lambda x: x.sum(-1),
    count=lambda x: toy.array([3, 4]),
)
SOURCES = {"tensorflow": TENSORFLOW, "toy": TOY}


def wrapped(source: SimpleNamespace, fn: Fn, **options: Any) -> Fn:
    """Return `fn(ops, *args)` of a source as a torch function."""
    return polybridge.wrap(functools.partial(fn, source), src=source.name, dst="torch", **options)


def native(fn: Fn) -> Fn:
    """Return `fn(ops, *args)` in torch."""
    return functools.partial(fn, TORCH)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the same numbers for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
