"""Functions of TensorFlow, each with a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.functions.points import complex_, definite, distinct, dominant, positive, real, regular, tall, unit

Tensor = Any
Fn = Callable[..., Any]


def symmetric(fn: Fn) -> Fn:
    """Return a function of the symmetric part, along which finite differences stay in its domain."""
    return lambda a: fn((a + tf.linalg.matrix_transpose(a)) / 2)


def eigh_projector(a: Tensor) -> Tensor:
    vector = tf.linalg.eigh(a)[1][:, :1]
    return vector @ tf.transpose(vector)


def svd_projectors(a: Tensor) -> tuple[Tensor, Tensor]:
    _, u, v = tf.linalg.svd(a)
    return u[:, :1] @ tf.transpose(u[:, :1]), v[:, :1] @ tf.transpose(v[:, :1])


def qr_positive(a: Tensor) -> tuple[Tensor, Tensor]:
    q, r = tf.linalg.qr(a)
    sign = tf.sign(tf.linalg.diag_part(r))
    return q * sign, sign[:, None] * r


@tf.function
def rnn(xs: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    for x in xs:
        h = tf.tanh(tf.linalg.matvec(w, x, transpose_a=True) + tf.linalg.matvec(u, h, transpose_a=True))
    return h


def lstm_cell(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = tf.split(tf.linalg.matvec(w, x, transpose_a=True) + tf.linalg.matvec(u, h, transpose_a=True), 4)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(c), c


def lotka_volterra(y: Tensor, p: Tensor) -> Tensor:
    def slope(y: Tensor) -> Tensor:
        return tf.stack([p[0] * y[0] - p[1] * y[0] * y[1], p[2] * y[0] * y[1] - p[3] * y[1]])

    for _ in range(2):  # Runge and Kutta's method of fourth order, with steps of 0.1
        a = slope(y)
        b = slope(y + 0.05 * a)
        c = slope(y + 0.05 * b)
        y = y + 0.1 / 6 * (a + 2 * b + 2 * c + slope(y + 0.1 * c))
    return y


def interp(x: Tensor, values: Tensor) -> Tensor:
    grid = tf.linspace(tf.constant(-2.0, x.dtype), 2.0, 4)
    i = tf.searchsorted(grid, x) - 1
    left, right = tf.gather(grid, i), tf.gather(grid, i + 1)
    low, high = tf.gather(values, i), tf.gather(values, i + 1)
    return low + (high - low) * (x - left) / (right - left)


def layer_norm(x: Tensor) -> Tensor:
    variance = tf.math.reduce_variance(x, -1, keepdims=True)  # of `tf.nn.moments` second derivatives are wrong (2.21)
    return (x - tf.reduce_mean(x, -1, keepdims=True)) * tf.math.rsqrt(variance + 1e-5)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2**0.5), v)


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    return tf.sqrt(tf.reduce_sum((x[:, None] - y[None]) ** 2, -1))


def while_loop(x: Tensor) -> Tensor:
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y) * x), [0, x])[1]


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # elementwise
    "sin": (tf.sin, real(3)),
    "exp": (tf.exp, real(2, 2)),
    "log": (tf.math.log, positive(3)),
    "tanh": (tf.tanh, real(3)),
    "asin": (tf.asin, unit(3)),
    "sigmoid": (tf.sigmoid, real(3)),
    "softplus": (tf.nn.softplus, real(3)),
    "elu": (tf.nn.elu, real(3)),
    "relu": (tf.nn.relu, real(3)),
    "gelu": (tf.nn.gelu, real(3)),
    "silu": (tf.nn.silu, real(3)),
    "sqrt": (tf.sqrt, positive(3)),
    "rsqrt": (tf.math.rsqrt, positive(3)),
    "expm1": (tf.math.expm1, real(3)),
    "log1p": (tf.math.log1p, positive(3)),
    "atan2": (tf.atan2, real(3), real(3)),
    "pow": (tf.pow, positive(3), real(3)),
    "divide": (tf.divide, real(2, 1), real(3)),
    "maximum": (tf.maximum, distinct(4), real(4)),
    "clip": (lambda x: tf.clip_by_value(x, -0.5, 0.8) ** 2, distinct(4)),
    "where": (lambda x: tf.where(x > 0, x * x, tf.sin(x)), real(4)),
    "scalar": (lambda x: tf.sin(x) * x, real()),
    # special
    "erf": (tf.math.erf, real(3)),
    "erfc": (tf.math.erfc, real(3)),
    "erfinv": (tf.math.erfinv, unit(3)),
    "ndtri": (tf.math.ndtri, positive(3) / 2),
    "lgamma": (tf.math.lgamma, positive(3)),
    "digamma": (tf.math.digamma, positive(3)),
    "polygamma": (lambda x: tf.math.polygamma(tf.ones_like(x), x), positive(3)),
    "gammainc": (lambda x: tf.math.igamma(tf.fill([3], tf.constant(2.5, x.dtype)), x), positive(3)),
    "xlogy": (tf.math.xlogy, positive(3), positive(3)),
    "entropy": (lambda x: -tf.math.multiply_no_nan(tf.math.log(x), x), positive(3)),
    "i0": (tf.math.special.bessel_i0, positive(3)),
    "i0e": (tf.math.bessel_i0e, positive(3)),
    "i1e": (tf.math.bessel_i1e, positive(3)),
    # linear algebra
    "matmul": (tf.matmul, real(2, 3), real(3, 2)),
    "einsum": (lambda a, b: tf.einsum("bij,bjk->bik", a, b), real(2, 1, 2), real(2, 2, 1)),
    "cross": (tf.linalg.cross, real(3), real(3)),
    "cholesky": (symmetric(tf.linalg.cholesky), definite(3)),
    "solve": (tf.linalg.solve, regular(2), real(2, 1)),
    "triangular_solve": (tf.linalg.triangular_solve, dominant(2), real(2, 1)),
    "inverse": (tf.linalg.inv, regular(2)),
    "pinv": (tf.linalg.pinv, tall()),
    "det": (tf.linalg.det, regular(2)),
    "slogdet": (lambda a: tf.linalg.slogdet(a)[1], regular(2)),
    "eigh_values": (symmetric(lambda a: tf.linalg.eigh(a)[0]), definite(3)),
    "eigh_projector": (symmetric(eigh_projector), definite(2)),
    "svd_values": (lambda a: tf.linalg.svd(a)[0], regular(2)),
    "svd_projectors": (svd_projectors, regular(2)),
    "qr": (qr_positive, regular(2)),
    "matrix_exp": (tf.linalg.expm, real(2, 2)),
    "trace": (tf.linalg.trace, real(2, 2)),
    "norm": (tf.norm, real(3)),
    "pairwise_distances": (pairwise_distances, real(2, 2), real(2, 2)),
    # Fourier and complex
    "fft": (tf.signal.fft, complex_(3)),
    "ifft": (tf.signal.ifft, complex_(3)),
    "rfft": (tf.signal.rfft, real(4)),
    "irfft": (tf.signal.irfft, complex_(3)),
    "fft2": (tf.signal.fft2d, complex_(2, 2)),
    "complex": (lambda a, b: tf.complex(a, b) ** 2, real(2), real(2)),
    "angle_and_abs": (lambda z: (tf.math.angle(z), tf.abs(z)), complex_(2)),
    "conjugate": (lambda z: (tf.math.conj(z) * z * z, tf.math.imag(tf.math.conj(z))), complex_(2)),
    # gather and scatter
    "gather_rows": (lambda x: tf.gather(x, [0, 2, 2]), real(3, 2)),
    "gather_elements": (lambda x: tf.gather(x, [[0, 1], [1, 1], [0, 0]], batch_dims=1), real(3, 2)),
    "gather_nd": (lambda x: tf.gather_nd(x, [[0, 1], [2, 0], [0, 1]]), real(3, 2)),
    "scatter_add": (lambda x, u: tf.tensor_scatter_nd_add(x, [[1], [1]], u) ** 2, real(3), real(2)),
    "scatter_set": (lambda x, u: tf.tensor_scatter_nd_update(x, [[0], [2]], u) ** 2, real(3), real(2)),
    "scatter_nd": (lambda x: tf.scatter_nd([[1], [3], [1]], x * x, [5]), real(3)),
    "boolean_mask": (lambda x: tf.boolean_mask(x, [True, False, True]), real(3)),
    "embedding": (lambda w: tf.nn.embedding_lookup(w, [0, 1, 1]) ** 2, real(2, 2)),
    "segment_sum": (lambda x: tf.math.segment_sum(x, [0, 0, 1]) ** 2, real(3)),
    "interp": (interp, unit(3), real(4)),
    # order
    "sort": (tf.sort, distinct(4)),
    "topk": (lambda x: tf.math.top_k(x, 2), distinct(4)),
    "amax": (lambda x: tf.reduce_max(x, 1), distinct(2, 3)),
    # reductions
    "mean": (lambda x: tf.reduce_mean(x, 0) ** 2, real(2, 3)),
    "prod": (tf.reduce_prod, real(3)),
    "logsumexp": (tf.reduce_logsumexp, real(3)),
    "logcumsumexp": (tf.math.cumulative_logsumexp, real(3)),
    "var": (tf.math.reduce_variance, real(3)),
    "softmax": (tf.nn.softmax, real(2, 3)),
    "log_softmax": (tf.nn.log_softmax, real(2, 3)),
    "cross_entropy": (lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 2], x), real(2, 3)),
    "cumsum": (lambda x: tf.cumsum(x, reverse=True) ** 2, real(3)),
    "cumprod": (tf.math.cumprod, real(3)),
    "layer_norm": (layer_norm, real(2, 3)),
    "attention": (attention, real(1, 2, 2), real(1, 2, 2), real(1, 2, 2)),
    # convolution and shape
    "conv1d": (lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), real(1, 3, 1), real(2, 1, 2)),
    "conv2d": (lambda x, k: tf.nn.conv2d(x, k, 1, "VALID"), real(1, 3, 3, 1), real(2, 2, 1, 1)),
    "conv_transpose": (
        lambda x, k: tf.nn.conv1d_transpose(x, k, [1, 4, 1], 1, "VALID"),
        real(1, 3, 1),
        real(2, 1, 1),
    ),
    "max_pool": (lambda x: tf.nn.max_pool2d(x, 2, 1, "VALID") ** 2, distinct(1, 3, 3, 1)),
    "avg_pool": (lambda x: tf.nn.avg_pool2d(x, 2, 1, "VALID") ** 2, real(1, 3, 3, 1)),
    "pad_roll_tile": (lambda x: tf.tile(tf.roll(tf.pad(x, [[1, 1]]), 1, 0), [2]) ** 2, real(2)),
    "slices": (lambda x: (x[1:, ::2] * x[:1, :1], x[..., None]), real(2, 3)),
    "unstack": (lambda x: tf.unstack(x * x), real(2, 2)),
    "broadcast": (lambda x: tf.broadcast_to(x, [3, 2]) ** 2, real(2)),
    # programs
    "rnn": (rnn, real(3, 2), real(2), real(2, 2), real(2, 2)),
    "lstm_cell": (lstm_cell, real(2), real(1), real(1), real(2, 4), real(1, 4)),
    "lotka_volterra": (lotka_volterra, positive(2), positive(4)),
    "map_fn": (lambda x: tf.map_fn(lambda row: tf.reduce_sum(row) * row, x), real(2, 2)),
    "while_loop": (while_loop, real(2)),
    "vmap_inside": (lambda x: tf.vectorized_map(lambda row: row / tf.reduce_sum(row), x), positive(2, 2)),
}
