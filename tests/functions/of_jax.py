"""Functions of JAX, each with a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.scipy import special

from tests.functions.points import complex_, definite, distinct, dominant, positive, real, regular, tall, unit

Array = jax.Array
Fn = Callable[..., Any]


def symmetric(fn: Fn) -> Fn:
    """Return a function of the symmetric part, along which finite differences stay in its domain."""
    return lambda a: fn((a + a.T) / 2)


def eigh_projector(a: Array) -> Array:
    vector = jnp.linalg.eigh(a)[1][:, :1]
    return vector @ vector.T


def svd_projectors(a: Array) -> tuple[Array, Array]:
    u, _, v = jnp.linalg.svd(a)
    return u[:, :1] @ u[:, :1].T, v[:1].T @ v[:1]


def qr_positive(a: Array) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(a)
    sign = jnp.sign(jnp.diagonal(r))
    return q * sign, sign[:, None] * r


def rnn(xs: Array, h: Array, w: Array, u: Array) -> Array:
    return lax.scan(lambda h, x: (jnp.tanh(x @ w + h @ u), None), h, xs)[0]


def lstm_cell(x: Array, h: Array, c: Array, w: Array, u: Array) -> tuple[Array, Array]:
    i, f, g, o = jnp.split(x @ w + h @ u, 4)
    c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(c), c


def lotka_volterra(y: Array, p: Array) -> Array:
    def slope(y: Array) -> Array:
        return jnp.stack([p[0] * y[0] - p[1] * y[0] * y[1], p[2] * y[0] * y[1] - p[3] * y[1]])

    def step(y: Array, _: None) -> tuple[Array, None]:
        a = slope(y)
        b = slope(y + 0.05 * a)
        c = slope(y + 0.05 * b)
        return y + 0.1 / 6 * (a + 2 * b + 2 * c + slope(y + 0.1 * c)), None

    return lax.scan(step, y, length=2)[0]  # Runge and Kutta's method of fourth order, with steps of 0.1


def layer_norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(q: Array, k: Array, v: Array) -> Array:
    return nn.softmax(q @ k.mT / 2**0.5) @ v


def convolution(dimensions: int) -> Fn:
    return lambda x, k: lax.conv_general_dilated(x, k, (1,) * dimensions, "VALID")


def pooled(x: Array, start: float, operation: Fn) -> Array:
    return lax.reduce_window(x, start, operation, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")


def pairwise_distances(x: Array, y: Array) -> Array:
    return jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))


def cross_entropy(x: Array) -> Array:
    return -jnp.take_along_axis(nn.log_softmax(x), jnp.array([[0], [2]]), 1).mean()


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # elementwise
    "sin": (jnp.sin, real(3)),
    "exp": (jnp.exp, real(2, 2)),
    "log": (jnp.log, positive(3)),
    "tanh": (jnp.tanh, real(3)),
    "sigmoid": (nn.sigmoid, real(3)),
    "softplus": (nn.softplus, real(3)),
    "elu": (nn.elu, real(3)),
    "relu": (nn.relu, real(3)),
    "gelu": (lambda x: nn.gelu(x, approximate=False), real(3)),
    "silu": (nn.silu, real(3)),
    "atan2": (jnp.atan2, real(3), real(3)),
    "pow": (jnp.power, positive(3), real(3)),
    "divide": (jnp.divide, real(2, 1), real(3)),
    "maximum": (jnp.maximum, distinct(4), real(4)),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.8) ** 2, distinct(4)),
    "where": (lambda x: jnp.where(x > 0, x * x, jnp.sin(x)), real(4)),
    "scalar": (lambda x: jnp.sin(x) * x, real()),
    # special
    "erf": (special.erf, real(3)),
    "erfc": (special.erfc, real(3)),
    "erfinv": (special.erfinv, unit(3)),
    "lgamma": (special.gammaln, positive(3)),
    "digamma": (special.digamma, positive(3)),
    "polygamma": (lambda x: special.polygamma(1, x), positive(3)),
    "gammainc": (lambda x: special.gammainc(2.5, x), positive(3)),
    "xlogy": (special.xlogy, positive(3), positive(3)),
    "entropy": (special.entr, positive(3)),
    "logit": (special.logit, positive(3) / 2),
    "i0": (special.i0, positive(3)),
    "i0e": (special.i0e, positive(3)),
    "i1e": (special.i1e, positive(3)),
    "sinc": (jnp.sinc, real(3)),
    # linear algebra
    "matmul": (jnp.matmul, real(2, 3), real(3, 2)),
    "einsum": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), real(2, 1, 2), real(2, 2, 1)),
    "kron": (jnp.kron, real(2, 1), real(1, 2)),
    "cross": (jnp.cross, real(3), real(3)),
    "cholesky": (symmetric(jnp.linalg.cholesky), definite(3)),
    "solve": (jnp.linalg.solve, regular(2), real(2, 1)),
    "triangular_solve": (
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
        dominant(2),
        real(2, 1),
    ),
    "inverse": (jnp.linalg.inv, regular(2)),
    "pinv": (jnp.linalg.pinv, tall()),
    "det": (jnp.linalg.det, regular(2)),
    "slogdet": (lambda a: jnp.linalg.slogdet(a)[1], regular(2)),
    "eigh_values": (symmetric(jnp.linalg.eigvalsh), definite(3)),
    "eigh_projector": (symmetric(eigh_projector), definite(2)),
    "svd_values": (lambda a: jnp.linalg.svd(a, compute_uv=False), regular(2)),
    "svd_projectors": (svd_projectors, regular(2)),
    "qr": (qr_positive, regular(2)),
    "matrix_power": (lambda a: jnp.linalg.matrix_power(a, 3), real(2, 2)),
    "norm": (jnp.linalg.norm, real(3)),
    "pairwise_distances": (pairwise_distances, real(2, 2), real(2, 2)),
    # Fourier and complex
    "fft": (jnp.fft.fft, complex_(3)),
    "ifft": (jnp.fft.ifft, complex_(3)),
    "rfft": (jnp.fft.rfft, real(4)),
    "irfft": (jnp.fft.irfft, complex_(3)),
    "fft2": (jnp.fft.fft2, complex_(2, 2)),
    "complex": (lambda a, b: lax.complex(a, b) ** 2, real(2), real(2)),
    "angle_and_abs": (lambda z: (jnp.angle(z), jnp.abs(z)), complex_(2)),
    "conjugate": (lambda z: (z.conj() * z * z, z.conj().imag), complex_(2)),
    # gather and scatter
    "gather_rows": (lambda x: x[jnp.array([0, 2, 2])], real(3, 2)),
    "gather_elements": (lambda x: jnp.take_along_axis(x, jnp.array([[0, 2], [2, 2]]), 0), real(3, 2)),
    "scatter_add": (lambda x, u: x.at[jnp.array([1, 1])].add(u) ** 2, real(3), real(2)),
    "scatter_set": (lambda x, u: x.at[jnp.array([0, 2])].set(u) ** 2, real(3), real(2)),
    "segment_sum": (lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1]), 2) ** 2, real(3)),
    "interp": (lambda x, values: jnp.interp(x, jnp.linspace(-2, 2, 4), values), unit(3), real(4)),
    # order
    "sort": (jnp.sort, distinct(4)),
    "topk": (lambda x: tuple(lax.top_k(x, 2)), distinct(4)),
    "amax": (lambda x: jnp.max(x, 1), distinct(2, 3)),
    "median": (jnp.median, distinct(3)),
    # reductions
    "mean": (lambda x: jnp.mean(x, 0) ** 2, real(2, 3)),
    "prod": (jnp.prod, real(3)),
    "logsumexp": (special.logsumexp, real(3)),
    "logcumsumexp": (lax.cumlogsumexp, real(3)),
    "var": (jnp.var, real(3)),
    "softmax": (nn.softmax, real(2, 3)),
    "log_softmax": (nn.log_softmax, real(2, 3)),
    "cross_entropy": (cross_entropy, real(2, 3)),
    "cumsum": (lambda x: jnp.cumsum(x) ** 2, real(3)),
    "cumprod": (jnp.cumprod, real(3)),
    "layer_norm": (layer_norm, real(2, 3)),
    "attention": (attention, real(1, 2, 2), real(1, 2, 2), real(1, 2, 2)),
    # convolution and shape
    "conv1d": (convolution(1), real(1, 1, 3), real(2, 1, 2)),
    "conv2d": (convolution(2), real(1, 1, 3, 3), real(1, 1, 2, 2)),
    "conv_transpose": (lambda x, k: lax.conv_transpose(x, k, (1,), "VALID"), real(1, 3, 1), real(2, 1, 1)),
    "max_pool": (lambda x: pooled(x, -jnp.inf, lax.max) ** 2, distinct(1, 1, 3, 3)),
    "avg_pool": (lambda x: (pooled(x, 0.0, lax.add) / 4) ** 2, real(1, 1, 3, 3)),
    "resize": (lambda x: jax.image.resize(x, (6,), "linear") ** 2, real(3)),
    "pad_roll_tile": (lambda x: jnp.tile(jnp.roll(jnp.pad(x, 1), 1), 2) ** 2, real(2)),
    "slices": (lambda x: (x[1:, ::2] * x[:1, :1], x[..., None]), real(2, 3)),
    "unstack": (lambda x: tuple(x * x), real(2, 2)),
    # programs
    "rnn": (rnn, real(3, 2), real(2), real(2, 2), real(2, 2)),
    "lstm_cell": (lstm_cell, real(2), real(1), real(1), real(2, 4), real(1, 4)),
    "lotka_volterra": (lotka_volterra, positive(2), positive(4)),
    "grad_inside": (jax.grad(lambda x: jnp.sin(x).prod()), real(3)),
    "vmap_inside": (jax.vmap(lambda x: x / x.sum()), positive(2, 2)),
}
