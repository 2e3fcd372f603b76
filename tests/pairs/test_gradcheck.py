"""Asks the frameworks' own checkers whether the first and second derivatives of many foreign functions are right."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

RNG = np.random.default_rng(0)


def real(*shape):
    """Return values away from 0, where many functions have a kink."""
    return RNG.uniform(0.2, 1.5, shape) * RNG.choice([-1, 1], shape)


def positive(*shape):
    return RNG.uniform(0.3, 1.5, shape)


def unit(*shape):
    return RNG.uniform(-0.8, 0.8, shape)


def distinct(*shape):
    """Return values that are well apart."""
    return RNG.permutation(np.prod(shape)).reshape(shape) * 0.7 - 1.1


def definite(n):
    """Return a positive definite matrix with eigenvalues apart."""
    q, _ = np.linalg.qr(RNG.normal(size=(n, n)))
    return q @ np.diag(1.0 + np.arange(n)) @ q.T


def regular(n):
    """Return an invertible matrix with singular values apart."""
    (p, _), (q, _) = np.linalg.qr(RNG.normal(size=(n, n))), np.linalg.qr(RNG.normal(size=(n, n)))
    return p @ np.diag(1.0 + np.arange(n)) @ q


def complex_(*shape):
    return real(*shape) + 1j * real(*shape)


def _tf_map(x):
    return tf.map_fn(lambda row: tf.reduce_sum(row) * row, x)


def _tf_while(x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y) * x), [0, x])[1]


def _projector(a):
    vector = tf.linalg.eigh(a)[1][:, :1]
    return vector @ tf.transpose(vector)


def _symmetric_tf(fn):
    return lambda a: fn((a + tf.linalg.matrix_transpose(a)) / 2)


def _symmetric_torch(fn):
    return lambda a: fn((a + a.mT) / 2)


TF = {
    # elementwise
    "sin": (tf.sin, real(3)),
    "exp": (tf.exp, real(2, 2)),
    "log": (tf.math.log, positive(3)),
    "tanh": (tf.tanh, real(3)),
    "sigmoid": (tf.sigmoid, real(3)),
    "softplus": (tf.nn.softplus, real(3)),
    "elu": (tf.nn.elu, real(3)),
    "relu": (tf.nn.relu, real(3)),
    "gelu": (tf.nn.gelu, real(3)),
    "swish": (tf.nn.silu, real(3)),
    "sqrt": (tf.sqrt, positive(3)),
    "rsqrt": (tf.math.rsqrt, positive(3)),
    "expm1": (tf.math.expm1, real(3)),
    "log1p": (tf.math.log1p, positive(3)),
    "atan2": (tf.atan2, real(3), real(3)),
    "pow": (tf.pow, positive(3), real(3)),
    "divide": (tf.divide, real(2, 1), real(3)),
    "maximum": (tf.maximum, distinct(4), real(4)),
    "scalar": (lambda x: tf.sin(x) * x, real()),
    # special
    "erf": (tf.math.erf, real(3)),
    "erfinv": (tf.math.erfinv, unit(3)),
    "lgamma": (tf.math.lgamma, positive(3)),
    "digamma": (tf.math.digamma, positive(3)),
    "xlogy": (tf.math.xlogy, positive(3), positive(3)),
    "bessel_i0": (tf.math.special.bessel_i0, positive(3)),
    # linear algebra
    "matmul": (tf.matmul, real(2, 3), real(3, 2)),
    "einsum": (lambda a, b: tf.einsum("bij,bjk->bik", a, b), real(2, 1, 2), real(2, 2, 1)),
    "cholesky": (_symmetric_tf(tf.linalg.cholesky), definite(3)),
    "solve": (tf.linalg.solve, regular(2), real(2, 1)),
    "triangular_solve": (tf.linalg.triangular_solve, regular(2) + 3 * np.eye(2), real(2, 1)),
    "inverse": (tf.linalg.inv, regular(2)),
    "det": (tf.linalg.det, regular(2)),
    "slogdet": (lambda a: tf.linalg.slogdet(a)[1], regular(2)),
    "eigh_values": (_symmetric_tf(lambda a: tf.linalg.eigh(a)[0]), definite(3)),
    "eigh_projector": (_symmetric_tf(_projector), definite(2)),
    "svd_values": (lambda a: tf.linalg.svd(a)[0], regular(2)),
    "qr": (lambda a: tf.linalg.qr(a), regular(2)),
    "trace": (tf.linalg.trace, real(2, 2)),
    "norm": (tf.norm, real(3)),
    # Fourier and complex
    "fft": (tf.signal.fft, complex_(3)),
    "ifft": (tf.signal.ifft, complex_(3)),
    "rfft": (tf.signal.rfft, real(4)),
    "irfft": (tf.signal.irfft, complex_(3)),
    "complex": (lambda a, b: tf.complex(a, b) ** 2, real(2), real(2)),
    "angle_and_abs": (lambda z: (tf.math.angle(z), tf.abs(z)), complex_(2)),
    # gather and scatter
    "gather": (lambda x: tf.gather(x, [0, 2, 2]), real(3, 2)),
    "gather_nd": (lambda x: tf.gather_nd(x, [[0, 1], [2, 0], [0, 1]]), real(3, 2)),
    "scatter_nd": (lambda x: tf.scatter_nd([[1], [3], [1]], x * x, [5]), real(3)),
    "scatter_add": (lambda x, u: tf.tensor_scatter_nd_add(x, [[1], [1]], u) ** 2, real(3), real(2)),
    "boolean_mask": (lambda x: tf.boolean_mask(x, [True, False, True]), real(3)),
    "where": (lambda x: tf.where(x > 0, x * x, tf.sin(x)), real(4)),
    "segment_sum": (lambda x: tf.math.segment_sum(x, [0, 0, 1]) ** 2, real(3)),
    # order
    "sort": (tf.sort, distinct(4)),
    "top_k": (lambda x: tf.math.top_k(x, 2), distinct(4)),
    "reduce_max": (lambda x: tf.reduce_max(x, 1), distinct(2, 3)),
    # reductions
    "reduce_mean": (lambda x: tf.reduce_mean(x, 0) ** 2, real(2, 3)),
    "reduce_prod": (tf.reduce_prod, real(3)),
    "logsumexp": (tf.reduce_logsumexp, real(3)),
    "variance": (tf.math.reduce_variance, real(3)),
    "softmax": (tf.nn.softmax, real(2, 3)),
    "cross_entropy": (lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 2], x), real(2, 3)),
    "cumsum": (lambda x: tf.cumsum(x, reverse=True) ** 2, real(3)),
    "cumprod": (tf.math.cumprod, real(3)),
    # convolution and shape
    "conv1d": (lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), real(1, 3, 1), real(2, 1, 2)),
    "conv2d": (lambda x, k: tf.nn.conv2d(x, k, 1, "VALID"), real(1, 3, 3, 1), real(2, 2, 1, 1)),
    "max_pool": (lambda x: tf.nn.max_pool2d(x, 2, 1, "VALID") ** 2, distinct(1, 3, 3, 1)),
    "avg_pool": (lambda x: tf.nn.avg_pool2d(x, 2, 1, "VALID") ** 2, real(1, 3, 3, 1)),
    "pad_roll_tile": (lambda x: tf.tile(tf.roll(tf.pad(x, [[1, 1]]), 1, 0), [2]) ** 2, real(2)),
    "slices": (lambda x: (x[1:, ::2] * x[:1, :1], x[..., None]), real(2, 3)),
    "unstack": (lambda x: tf.unstack(x * x), real(2, 2)),
    # control flow
    "map_fn": (_tf_map, real(2, 2)),
    "while_loop": (_tf_while, real(2)),
    "tf_function": (tf.function(lambda x: tf.sin(x) * x), real(2)),
    "dict": (lambda x: {"a": tf.sin(x), "b": [x * x]}, real(2)),
}

TORCH = {
    # elementwise
    "sin": (torch.sin, real(3)),
    "exp": (torch.exp, real(2, 2)),
    "log": (torch.log, positive(3)),
    "tanh": (torch.tanh, real(3)),
    "sigmoid": (torch.sigmoid, real(3)),
    "softplus": (torch.nn.functional.softplus, real(3)),
    "elu": (torch.nn.functional.elu, real(3)),
    "relu": (torch.relu, real(3)),
    "gelu": (torch.nn.functional.gelu, real(3)),
    "silu": (torch.nn.functional.silu, real(3)),
    "sqrt": (torch.sqrt, positive(3)),
    "rsqrt": (torch.rsqrt, positive(3)),
    "expm1": (torch.expm1, real(3)),
    "log1p": (torch.log1p, positive(3)),
    "atan2": (torch.atan2, real(3), real(3)),
    "pow": (torch.pow, positive(3), real(3)),
    "divide": (torch.div, real(2, 1), real(3)),
    "maximum": (torch.maximum, distinct(4), real(4)),
    "scalar": (lambda x: torch.sin(x) * x, real()),
    # special
    "erf": (torch.erf, real(3)),
    "erfinv": (torch.erfinv, unit(3)),
    "lgamma": (torch.lgamma, positive(3)),
    "digamma": (torch.digamma, positive(3)),
    "xlogy": (torch.xlogy, positive(3), positive(3)),
    "i0": (torch.special.i0, positive(3)),
    # linear algebra
    "matmul": (torch.matmul, real(2, 3), real(3, 2)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), real(2, 1, 2), real(2, 2, 1)),
    "cholesky": (_symmetric_torch(torch.linalg.cholesky), definite(3)),
    "solve": (torch.linalg.solve, regular(2), real(2, 1)),
    "triangular_solve": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        regular(2) + 3 * np.eye(2),
        real(2, 1),
    ),
    "inverse": (torch.linalg.inv, regular(2)),
    "det": (torch.linalg.det, regular(2)),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], regular(2)),
    "eigh_values": (_symmetric_torch(torch.linalg.eigvalsh), definite(3)),
    "svd_values": (torch.linalg.svdvals, regular(2)),
    "qr": (torch.linalg.qr, regular(2)),
    "matrix_exp": (torch.linalg.matrix_exp, real(2, 2)),
    "norm": (torch.linalg.vector_norm, real(3)),
    # Fourier and complex
    "fft": (torch.fft.fft, complex_(3)),
    "ifft": (torch.fft.ifft, complex_(3)),
    "rfft": (torch.fft.rfft, real(4)),
    "irfft": (torch.fft.irfft, complex_(3)),
    "complex": (lambda a, b: torch.complex(a, b) ** 2, real(2), real(2)),
    "angle_and_abs": (lambda z: (torch.angle(z), torch.abs(z)), complex_(2)),
    "conjugate_view": (lambda z: (z.conj(), z.conj().imag), complex_(2)),
    # gather and scatter
    "gather": (lambda x: torch.gather(x, 0, torch.tensor([[0, 2], [2, 2]])), real(3, 2)),
    "index_select": (lambda x: x[torch.tensor([0, 2, 2])], real(3, 2)),
    "scatter_add": (lambda x, u: x.scatter_add(0, torch.tensor([1, 1]), u) ** 2, real(3), real(2)),
    "index_put": (lambda x, u: x.index_put((torch.tensor([0, 2]),), u) ** 2, real(3), real(2)),
    "masked_select": (lambda x: x[x > 0], real(4)),
    "where": (lambda x: torch.where(x > 0, x * x, torch.sin(x)), real(4)),
    "embedding": (lambda w: torch.nn.functional.embedding(torch.tensor([0, 1, 1]), w) ** 2, real(2, 2)),
    # order
    "sort": (torch.sort, distinct(4)),
    "topk": (lambda x: torch.topk(x, 2), distinct(4)),
    "amax": (lambda x: torch.amax(x, 1), distinct(2, 3)),
    "median": (lambda x: torch.median(x, 0), distinct(3)),
    # reductions
    "mean": (lambda x: torch.mean(x, 0) ** 2, real(2, 3)),
    "prod": (torch.prod, real(3)),
    "logsumexp": (lambda x: torch.logsumexp(x, 0), real(3)),
    "var": (torch.var, real(3)),
    "softmax": (lambda x: torch.softmax(x, 1), real(2, 3)),
    "cross_entropy": (lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([0, 2])), real(2, 3)),
    "cumsum": (lambda x: torch.cumsum(x, 0) ** 2, real(3)),
    "cumprod": (lambda x: torch.cumprod(x, 0), real(3)),
    # convolution and shape
    "conv1d": (torch.nn.functional.conv1d, real(1, 1, 3), real(2, 1, 2)),
    "conv2d": (torch.nn.functional.conv2d, real(1, 1, 3, 3), real(1, 1, 2, 2)),
    "max_pool": (lambda x: torch.nn.functional.max_pool2d(x, 2, 1) ** 2, distinct(1, 1, 3, 3)),
    "avg_pool": (lambda x: torch.nn.functional.avg_pool2d(x, 2, 1) ** 2, real(1, 1, 3, 3)),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, (3,)), real(2, 3)),
    "attention": (torch.nn.functional.scaled_dot_product_attention, real(1, 2, 2), real(1, 2, 2), real(1, 2, 2)),
    "interpolate": (lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode="linear") ** 2, real(1, 1, 3)),
    "pad_roll_tile": (lambda x: torch.nn.functional.pad(x, (1, 1)).roll(1).tile(2) ** 2, real(2)),
    "slices": (lambda x: (x[1:, ::2] * x[:1, :1], x[..., None]), real(2, 3)),
    "unbind": (lambda x: (x * x).unbind(), real(2, 2)),
    "expand": (lambda x: x.expand(3, 2), real(2)),
    # torch's own derivatives and writes inside
    "func_grad": (torch.func.grad(lambda x: torch.sin(x).prod()), real(3)),
    "func_vmap": (torch.func.vmap(lambda x: x / x.sum()), positive(2, 2)),
    "in_place_on_own_memory": (lambda x: (x * 2).sin_().mul_(x), real(3)),
    "dict": (lambda x: {"a": torch.sin(x), "b": [x * x]}, real(2)),
}


def floating(tree):
    """Return the differentiable torch tensors of a result as a tuple, which is what torch's checkers take."""
    found = torch.utils._pytree.tree_leaves(tree)
    return tuple(y for y in found if y.is_floating_point() or y.is_complex())


def joined(tree):
    """Return the differentiable TensorFlow tensors of a result as one real vector, which TensorFlow's checker takes."""
    found = [y for y in tf.nest.flatten(tree) if y.dtype.is_floating or y.dtype.is_complex]
    parts = [part for y in found for part in ([tf.math.real(y), tf.math.imag(y)] if y.dtype.is_complex else [y])]
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def in_torch(case):
    fn, *arrays = case
    wrapped = polybridge.wrap(fn, src="tensorflow", dst="torch")
    return (lambda *xs: floating(wrapped(*xs))), [torch.tensor(x, requires_grad=True) for x in arrays]


def in_tf(case):
    fn, *arrays = case
    wrapped = polybridge.wrap(fn, src="torch", dst="tensorflow")
    return (lambda *xs: joined(wrapped(*xs))), [tf.constant(x) for x in arrays]


def assert_tf_gradients(fn, xs):
    theoretical, numerical = tf.test.compute_gradient(fn, xs, delta=1e-4)
    for found, expected in zip(theoretical, numerical, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", TF.values(), ids=TF)
def test_tf_function_in_torch_passes_gradcheck(case):
    fn, xs = in_torch(case)
    assert torch.autograd.gradcheck(fn, xs)


@pytest.mark.parametrize("case", TF.values(), ids=TF)
def test_tf_function_in_torch_passes_gradgradcheck(case):
    fn, xs = in_torch(case)
    assert torch.autograd.gradgradcheck(fn, xs)


@pytest.mark.parametrize("case", TORCH.values(), ids=TORCH)
def test_torch_function_in_tf_passes_tfs_check(case):
    assert_tf_gradients(*in_tf(case))


@pytest.mark.parametrize("case", TORCH.values(), ids=TORCH)
def test_gradient_of_torch_function_in_tf_passes_tfs_check(case):
    fn, xs = in_tf(case)

    def gradients(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = tf.sin(fn(*inputs))
        return joined(tape.gradient(y, inputs, unconnected_gradients="zero"))

    assert_tf_gradients(gradients, xs)


def test_gradcheck_accepts_batched_gradients():
    fn, xs = in_torch((lambda x: tf.sin(x) * x, real(3)))
    assert torch.autograd.gradcheck(fn, xs, check_batched_grad=True)


def test_gradcheck_accepts_non_contiguous_cotangents():
    fn, xs = in_torch((lambda x: tf.transpose(tf.sin(x)), real(2, 3)))
    assert torch.autograd.gradgradcheck(fn, xs, gen_non_contig_grad_outputs=True)
