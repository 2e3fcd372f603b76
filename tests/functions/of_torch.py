"""Functions of torch, each with a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.functions.points import complex_, definite, distinct, dominant, positive, real, regular, tall, unit

Tensor = torch.Tensor
Fn = Callable[..., Any]


def symmetric(fn: Fn) -> Fn:
    """Return a function of the symmetric part, along which finite differences stay in its domain."""
    return lambda a: fn((a + a.mT) / 2)


def eigh_projector(a: Tensor) -> Tensor:
    vector = torch.linalg.eigh(a)[1][:, :1]
    return vector @ vector.mT


def svd_projectors(a: Tensor) -> tuple[Tensor, Tensor]:
    u, _, v = torch.linalg.svd(a)
    return u[:, :1] @ u[:, :1].mT, v[:1].mT @ v[:1]


def qr_positive(a: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(a)
    sign = torch.sign(torch.diagonal(r))
    return q * sign, sign[:, None] * r


def rnn(xs: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    for x in xs:
        h = torch.tanh(x @ w + h @ u)
    return h


def lstm_cell(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x @ w + h @ u).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lotka_volterra(y: Tensor, p: Tensor) -> Tensor:
    def slope(y: Tensor) -> Tensor:
        return torch.stack([p[0] * y[0] - p[1] * y[0] * y[1], p[2] * y[0] * y[1] - p[3] * y[1]])

    for _ in range(2):  # Runge and Kutta's method of fourth order, with steps of 0.1
        a = slope(y)
        b = slope(y + 0.05 * a)
        c = slope(y + 0.05 * b)
        y = y + 0.1 / 6 * (a + 2 * b + 2 * c + slope(y + 0.1 * c))
    return y


def interp(x: Tensor, values: Tensor) -> Tensor:
    grid = torch.linspace(-2, 2, 4, dtype=x.dtype)
    i = torch.searchsorted(grid, x.detach()) - 1
    return values[i] + (values[i + 1] - values[i]) * (x - grid[i]) / (grid[i + 1] - grid[i])


def layer_norm(x: Tensor) -> Tensor:
    variance = torch.var(x, -1, correction=0, keepdim=True)  # third derivatives of `F.layer_norm` are wrong (2.13)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # elementwise
    "sin": (torch.sin, real(3)),
    "exp": (torch.exp, real(2, 2)),
    "log": (torch.log, positive(3)),
    "tanh": (torch.tanh, real(3)),
    "asin": (torch.asin, unit(3)),
    "sigmoid": (torch.sigmoid, real(3)),
    "softplus": (F.softplus, real(3)),
    "elu": (F.elu, real(3)),
    "relu": (torch.relu, real(3)),
    "gelu": (F.gelu, real(3)),
    "silu": (F.silu, real(3)),
    "sqrt": (torch.sqrt, positive(3)),
    "rsqrt": (torch.rsqrt, positive(3)),
    "expm1": (torch.expm1, real(3)),
    "log1p": (torch.log1p, positive(3)),
    "atan2": (torch.atan2, real(3), real(3)),
    "pow": (torch.pow, positive(3), real(3)),
    "divide": (torch.div, real(2, 1), real(3)),
    "maximum": (torch.maximum, distinct(4), real(4)),
    "clip": (lambda x: torch.clamp(x, -0.5, 0.8) ** 2, distinct(4)),
    "where": (lambda x: torch.where(x > 0, x * x, torch.sin(x)), real(4)),
    "scalar": (lambda x: torch.sin(x) * x, real()),
    # special
    "erf": (torch.erf, real(3)),
    "erfc": (torch.erfc, real(3)),
    "erfinv": (torch.erfinv, unit(3)),
    "ndtri": (torch.special.ndtri, positive(3) / 2),
    "lgamma": (torch.lgamma, positive(3)),
    "digamma": (torch.digamma, positive(3)),
    "polygamma": (lambda x: torch.polygamma(1, x), positive(3)),
    "gammainc": (lambda x: torch.special.gammainc(torch.tensor(2.5, dtype=x.dtype), x), positive(3)),
    "xlogy": (torch.xlogy, positive(3), positive(3)),
    "entropy": (torch.special.entr, positive(3)),
    "logit": (torch.logit, positive(3) / 2),
    "i0": (torch.special.i0, positive(3)),
    "i0e": (torch.special.i0e, positive(3)),
    "i1e": (torch.special.i1e, positive(3)),
    "sinc": (torch.sinc, real(3)),
    # linear algebra
    "matmul": (torch.matmul, real(2, 3), real(3, 2)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), real(2, 1, 2), real(2, 2, 1)),
    "kron": (torch.kron, real(2, 1), real(1, 2)),
    "cross": (torch.linalg.cross, real(3), real(3)),
    "cholesky": (symmetric(torch.linalg.cholesky), definite(3)),
    "solve": (torch.linalg.solve, regular(2), real(2, 1)),
    "triangular_solve": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), dominant(2), real(2, 1)),
    "inverse": (torch.linalg.inv, regular(2)),
    "pinv": (torch.linalg.pinv, tall()),
    "det": (torch.linalg.det, regular(2)),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], regular(2)),
    "eigh_values": (symmetric(torch.linalg.eigvalsh), definite(3)),
    "eigh_projector": (symmetric(eigh_projector), definite(2)),
    "svd_values": (torch.linalg.svdvals, regular(2)),
    "svd_projectors": (svd_projectors, regular(2)),
    "qr": (qr_positive, regular(2)),
    "matrix_exp": (torch.linalg.matrix_exp, real(2, 2)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), real(2, 2)),
    "trace": (torch.trace, real(2, 2)),
    "norm": (torch.linalg.vector_norm, real(3)),
    "pairwise_distances": (pairwise_distances, real(2, 2), real(2, 2)),
    # Fourier and complex
    "fft": (torch.fft.fft, complex_(3)),
    "ifft": (torch.fft.ifft, complex_(3)),
    "rfft": (torch.fft.rfft, real(4)),
    "irfft": (torch.fft.irfft, complex_(3)),
    "fft2": (torch.fft.fft2, complex_(2, 2)),
    "complex": (lambda a, b: torch.complex(a, b) ** 2, real(2), real(2)),
    "angle_and_abs": (lambda z: (torch.angle(z), torch.abs(z)), complex_(2)),
    "conjugate": (lambda z: (z.conj() * z * z, z.conj().imag), complex_(2)),
    # gather and scatter
    "gather_rows": (lambda x: x[torch.tensor([0, 2, 2])], real(3, 2)),
    "gather_elements": (lambda x: torch.gather(x, 0, torch.tensor([[0, 2], [2, 2]])), real(3, 2)),
    "scatter_add": (lambda x, u: x.scatter_add(0, torch.tensor([1, 1]), u) ** 2, real(3), real(2)),
    "scatter_set": (lambda x, u: x.index_put((torch.tensor([0, 2]),), u) ** 2, real(3), real(2)),
    "boolean_mask": (lambda x: x[x > 0], real(4)),
    "embedding": (lambda w: F.embedding(torch.tensor([0, 1, 1]), w) ** 2, real(2, 2)),
    "interp": (interp, unit(3), real(4)),
    # order
    "sort": (lambda x: tuple(torch.sort(x)), distinct(4)),
    "topk": (lambda x: tuple(torch.topk(x, 2)), distinct(4)),
    "amax": (lambda x: torch.amax(x, 1), distinct(2, 3)),
    "median": (lambda x: tuple(torch.median(x, 0)), distinct(3)),
    # reductions
    "mean": (lambda x: torch.mean(x, 0) ** 2, real(2, 3)),
    "prod": (torch.prod, real(3)),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), real(3)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), real(3)),
    "var": (torch.var, real(3)),
    "softmax": (lambda x: torch.softmax(x, 1), real(2, 3)),
    "log_softmax": (lambda x: torch.log_softmax(x, 1), real(2, 3)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 2])), real(2, 3)),
    "cumsum": (lambda x: torch.cumsum(x, 0) ** 2, real(3)),
    "cumprod": (lambda x: torch.cumprod(x, 0), real(3)),
    "layer_norm": (layer_norm, real(2, 3)),
    "attention": (F.scaled_dot_product_attention, real(1, 2, 2), real(1, 2, 2), real(1, 2, 2)),
    # convolution and shape
    "conv1d": (F.conv1d, real(1, 1, 3), real(2, 1, 2)),
    "conv2d": (F.conv2d, real(1, 1, 3, 3), real(1, 1, 2, 2)),
    "conv_transpose": (F.conv_transpose1d, real(1, 1, 3), real(1, 1, 2)),
    "max_pool": (lambda x: F.max_pool2d(x, 2, 1) ** 2, distinct(1, 1, 3, 3)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2, 1) ** 2, real(1, 1, 3, 3)),
    "resize": (lambda x: F.interpolate(x, scale_factor=2, mode="linear") ** 2, real(1, 1, 3)),
    "pad_roll_tile": (lambda x: F.pad(x, (1, 1)).roll(1).tile(2) ** 2, real(2)),
    "slices": (lambda x: (x[1:, ::2] * x[:1, :1], x[..., None]), real(2, 3)),
    "unstack": (lambda x: (x * x).unbind(), real(2, 2)),
    "broadcast": (lambda x: x.expand(3, 2) ** 2, real(2)),
    # programs
    "rnn": (rnn, real(3, 2), real(2), real(2, 2), real(2, 2)),
    "lstm_cell": (lstm_cell, real(2), real(1), real(1), real(2, 4), real(1, 4)),
    "lotka_volterra": (lotka_volterra, positive(2), positive(4)),
    "grad_inside": (torch.func.grad(lambda x: torch.sin(x).prod()), real(3)),
    "vmap_inside": (torch.func.vmap(lambda x: x / x.sum()), positive(2, 2)),
    "write_to_own_memory": (lambda x: (x * 2).sin_().mul_(x), real(3)),
}
