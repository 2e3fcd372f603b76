"""What goes wrong when memory is shared without care, each as a function that fails if it does.

A trap takes `wrap(fn)`. It runs in a process of its own, since it may abort it or change TensorFlow's constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf
import torch

import polybridge
from tests.pairs import naive

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Trap(NamedTuple):
    """One trap, and how a plain DLPack bridge ends in it: the process dies, a wrong value, or an exception."""

    run: Callable[[Wrap], None]
    src: str
    dst: str
    plain: Literal["killed", "wrong", "refused"]


TRAPS: dict[str, Trap] = {}


def run(name: str, bridge: str) -> None:
    """Run a trap with polybridge or with the naive bridge."""
    trap = TRAPS[name]
    wrap = {"polybridge": polybridge.wrap, "naive": naive.wrap}[bridge]
    trap.run(lambda fn, **options: wrap(fn, src=trap.src, dst=trap.dst, **options))


def _trap(src: str, dst: str, plain: Literal["killed", "wrong", "refused"]) -> Any:
    def add(fn: Callable[[Wrap], None]) -> Callable[[Wrap], None]:
        TRAPS[fn.__name__] = Trap(fn, src, dst, plain)
        return fn

    return add


def in_torch(plain: Literal["killed", "wrong", "refused"]) -> Any:
    """Add a trap of a TensorFlow function in torch."""
    return _trap("tensorflow", "torch", plain)


def in_tf(plain: Literal["killed", "wrong", "refused"]) -> Any:
    """Add a trap of a torch function in TensorFlow."""
    return _trap("torch", "tensorflow", plain)


def equal(found: Any, expected: Any) -> None:
    """Assert equal values."""
    values = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


# Alignment.


@in_torch("killed")
def a_row_is_not_aligned(wrap: Wrap) -> None:
    """Case 1."""
    equal(wrap(tf.sin)(torch.arange(6.0).view(3, 2)[1]), np.sin([2.0, 3.0]))


@in_torch("killed")
def a_tail_is_not_aligned(wrap: Wrap) -> None:
    equal(wrap(lambda x: x + x)(torch.arange(6.0)[1:]), [2, 4, 6, 8, 10])


@in_torch("killed")
def a_chunk_is_not_aligned(wrap: Wrap) -> None:
    equal(wrap(tf.nn.relu)(torch.arange(9.0).split(3)[1]), [3, 4, 5])


@in_torch("killed")
def an_element_is_not_aligned(wrap: Wrap) -> None:
    equal(wrap(tf.sin)(torch.arange(6.0)[1]), np.sin(1.0))


@in_torch("killed")
def an_array_is_not_aligned(wrap: Wrap) -> None:
    raw = np.zeros(64 + 4 * 101, "uint8")
    start = -raw.ctypes.data % 64 + 16
    array = raw[start : start + 4 * 80].view("float32")
    array[:] = 1
    equal(wrap(tf.sin)(torch.from_numpy(array)), np.full(80, np.sin(1.0)))


@in_torch("killed")
def a_cotangent_is_not_aligned(wrap: Wrap) -> None:
    x = torch.ones(3, requires_grad=True)
    equal(*_grad(wrap(tf.square)(x), x, torch.arange(6.0)[1:4]), [2, 4, 6])


@in_tf("killed")
def a_result_is_not_aligned(wrap: Wrap) -> None:
    equal(tf.sin(wrap(lambda x: x.sin()[1:])(tf.range(6.0))), np.sin(np.sin(np.arange(1.0, 6))))


# Strides and lazy bits.


@in_torch("refused")
def a_transposed_input_is_strided(wrap: Wrap) -> None:
    """Case 3."""
    equal(wrap(lambda a: a[1, 0])(torch.arange(6.0).view(2, 3).T), 1)


@in_torch("refused")
def every_second_element_is_strided(wrap: Wrap) -> None:
    equal(wrap(lambda a: a * 1)(torch.arange(6.0)[::2]), [0, 2, 4])


@in_torch("refused")
def an_expanded_input_has_stride_zero(wrap: Wrap) -> None:
    """Case 4."""
    equal(wrap(lambda a: a * 1)(torch.tensor([2.0]).expand(3)), [2, 2, 2])


@in_torch("refused")
def the_cotangent_of_a_sum_has_stride_zero(wrap: Wrap) -> None:
    x = torch.ones(3, requires_grad=True)
    wrap(tf.square)(x).sum().backward()
    equal(x.grad, [2, 2, 2])


@in_tf("refused")
def a_transposed_result_is_strided(wrap: Wrap) -> None:
    equal(wrap(lambda x: x.T)(tf.constant([[1.0, 2.0], [3.0, 4.0]])), [[1, 3], [2, 4]])


@in_torch("wrong")
def a_conjugated_input_is_lazy(wrap: Wrap) -> None:
    """Case 6."""
    equal(wrap(lambda z: z * 1)(torch.tensor([1 + 2j]).conj()), [1 - 2j])


@in_torch("killed")
def a_negated_input_is_lazy(wrap: Wrap) -> None:
    equal(wrap(lambda z: z * 1)(torch.tensor([1 + 2j]).conj().imag), [-2])


@in_tf("wrong")
def a_conjugated_result_is_lazy(wrap: Wrap) -> None:
    equal(wrap(lambda z: (z * 1).conj())(tf.constant([1 + 2j])), [1 - 2j])


@in_torch("refused")
def a_gradient_is_indexed_slices(wrap: Wrap) -> None:
    """Case 36."""
    w = torch.ones(3, requires_grad=True)
    wrap(lambda w: tf.gather(w, [0, 0, 2]))(w).backward(torch.ones(3))
    equal(w.grad, [2, 0, 1])


# torch writes to what it is given.


@in_torch("wrong")
def torch_writes_to_a_result_that_is_a_residual(wrap: Wrap) -> None:
    """Case 20."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    y = wrap(tf.exp)(x)
    y.add_(10)
    y.backward(torch.ones(2))
    equal(x.grad, np.exp([0.0, 1.0]))


@in_torch("wrong")
def torch_applies_an_activation_in_place(wrap: Wrap) -> None:
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    y = wrap(tf.tanh)(x)
    torch.nn.LeakyReLU(0.5, inplace=True)(y).backward(torch.ones(2))
    slope = 1 - np.tanh(1.0) ** 2
    equal(x.grad, [slope / 2, slope])


@in_torch("wrong")
def torch_scales_a_result_in_place(wrap: Wrap) -> None:
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    y = wrap(tf.sigmoid)(x)
    y.mul_(3).backward(torch.ones(2))
    s = 1 / (1 + np.exp(-np.array([0.5, 1.0])))
    equal(x.grad, 3 * s * (1 - s))


@in_torch("wrong")
def gradients_of_a_sum_share_memory(wrap: Wrap) -> None:
    """Case 21."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for _ in range(2):
        wrap(lambda a, b: a + b)(a, b).backward(torch.ones(2))
    equal(torch.stack([a.grad, b.grad]), [[2, 2], [2, 2]])


@in_torch("wrong")
def clipping_gradients_that_share_memory_clips_twice(wrap: Wrap) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    wrap(lambda a, b: a + b)(a, b).backward(torch.ones(2))
    torch.nn.utils.clip_grad_norm_([a, b], 1.0, foreach=False)
    equal(torch.stack([a.grad, b.grad]), np.full((2, 2), 0.5))


@in_torch("wrong")
def zeroing_one_gradient_zeroes_another(wrap: Wrap) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    wrap(lambda a, b: a + b)(a, b).backward(torch.ones(2))
    a.grad.zero_()
    equal(b.grad, [1, 1])


@in_torch("wrong")
def the_gradient_is_the_callers_cotangent(wrap: Wrap) -> None:
    x, ct = torch.ones(3, requires_grad=True), torch.ones(3)
    (gradient,) = _grad(wrap(lambda x: x + tf.zeros(3))(x), x, ct)
    gradient.mul_(5)
    equal(ct, [1, 1, 1])


@in_torch("wrong")
def the_result_is_the_input(wrap: Wrap) -> None:
    """Case 23."""
    x = torch.ones(3)
    wrap(lambda a: a)(x).add_(1)
    equal(x, [1, 1, 1])


@in_torch("wrong")
def the_result_is_a_view_of_the_input(wrap: Wrap) -> None:
    x = torch.ones(3)
    wrap(lambda a: tf.reshape(a, (1, 3)))(x).add_(1)
    equal(x, [1, 1, 1])


@in_torch("wrong")
def two_results_are_one_tensor(wrap: Wrap) -> None:
    first, second = wrap(lambda a: (lambda y: (y, tf.reshape(y, (3, 1))))(a * 2))(torch.ones(3))
    first.add_(1)
    equal(second, [[2], [2], [2]])


@in_torch("wrong")
def the_result_is_a_constant_of_the_function(wrap: Wrap) -> None:
    constant = tf.ones(3)
    wrap(lambda a: (a * 2, constant))(torch.ones(3))[1].zero_()
    equal(constant, [1, 1, 1])


@in_torch("wrong")
def the_result_is_the_value_of_a_variable(wrap: Wrap) -> None:
    variable = tf.Variable([1.0, 1.0, 1.0], trainable=False)
    wrap(lambda a: (a * 2, variable.value()))(torch.ones(3))[1].zero_()
    equal(variable, [1, 1, 1])


@in_torch("wrong")
def the_result_is_a_cached_scalar(wrap: Wrap) -> None:
    """Case 18."""
    wrap(lambda a: (a * 2, tf.constant(2.0)))(torch.ones(3))[1].mul_(21)
    equal(tf.constant(2.0), 2)


@in_torch("wrong")
def the_caller_writes_to_an_input_that_the_function_kept(wrap: Wrap) -> None:
    x, variable = torch.ones(3), tf.Variable([0.0, 0.0, 0.0], trainable=False)
    wrap(lambda a: variable.assign(a) * 2)(x)
    x.add_(1)
    equal(variable, [1, 1, 1])


@in_torch("wrong")
def the_caller_writes_to_an_input_that_the_function_kept_in_a_list(wrap: Wrap) -> None:
    kept: list[tf.Tensor] = []
    wrapped = wrap(lambda a: kept.append(a) or a * 2)
    x = torch.zeros(3)
    for _ in range(4):
        x.add_(1)
        wrapped(x)
    equal(tf.stack(kept), [[i] * 3 for i in (1, 2, 3, 4)])


@in_torch("wrong")
def the_caller_writes_to_an_input_before_backward(wrap: Wrap) -> None:
    """Right is the gradient of the old value or torch's own refusal."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = wrap(tf.square)(x)
    with torch.no_grad():
        x.mul_(10)
    try:
        y.backward(torch.ones(2))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    equal(x.grad, [2, 4])


@in_torch("wrong")
def the_caller_writes_to_a_constant_input_before_backward(wrap: Wrap) -> None:
    """As above, with the write to the input that needs no gradient."""
    x, a = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    y = wrap(lambda x, a: x * a)(x, a)
    a.zero_()
    try:
        y.backward(torch.ones(2))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    equal(x.grad, [3, 4])


@in_torch("wrong")
def the_caller_writes_to_a_cotangent_before_the_second_backward(wrap: Wrap) -> None:
    x, ct = torch.tensor(2.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    (first,) = torch.autograd.grad(wrap(tf.square)(x), x, ct, create_graph=True)
    with torch.no_grad():
        ct.fill_(100)
    try:
        (second,) = torch.autograd.grad(first, x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    equal(second, 2)


# A torch function writes to what it is lent, or to what it returned.


@in_tf("wrong")
def torch_writes_to_a_constant(wrap: Wrap) -> None:
    """Case 25."""
    x = tf.constant([1.0, 2.0])
    equal(wrap(lambda a: a.mul_(3))(x), [3, 6])
    equal(x, [1, 2])


@in_tf("wrong")
def torch_writes_to_a_variable(wrap: Wrap) -> None:
    x = tf.Variable([1.0, 2.0], trainable=False)
    equal(wrap(lambda a: a.mul_(3))(x), [3, 6])
    equal(x, [1, 2])


@in_tf("wrong")
def torch_writes_to_a_taped_variable(wrap: Wrap) -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = wrap(lambda a: a.mul_(3) * a)(x)
    equal(x, [1, 2])
    equal(tape.gradient(y, x), [18, 36])


@in_tf("wrong")
def torch_applies_an_activation_to_its_input_in_place(wrap: Wrap) -> None:
    x = tf.constant([-1.0, 2.0])
    equal(wrap(torch.nn.ReLU(inplace=True))(x), [0, 2])
    equal(x, [-1, 2])


@in_tf("wrong")
def torch_writes_to_a_cached_scalar(wrap: Wrap) -> None:
    """Case 18."""
    equal(wrap(lambda a: a.detach().mul_(42))(tf.constant(2.0)), 84)
    equal(tf.constant(2.0), 2)


@in_tf("wrong")
def torch_writes_to_a_cached_integer(wrap: Wrap) -> None:
    wrap(lambda a: a.detach().mul_(6))(tf.constant(7))
    equal(tf.constant(7), 7)


@in_tf("wrong")
def torch_writes_past_the_version_counter(wrap: Wrap) -> None:
    x, wrapped = tf.constant([1.0, 2.0]), wrap(lambda a: (a.data.mul_(3), a * 1)[1])
    for _ in range(4):
        equal(wrapped(x), [3, 6])
    equal(x, [1, 2])


@in_tf("wrong")
def torch_writes_through_numpy(wrap: Wrap) -> None:
    x, wrapped = tf.constant([1.0, 2.0]), wrap(lambda a: (a.detach().numpy().__imul__(3), a * 1)[1])
    for _ in range(4):
        equal(wrapped(x), [3, 6])
    equal(x, [1, 2])


@in_tf("wrong")
def torch_keeps_its_input_and_writes_to_it_later(wrap: Wrap) -> None:
    kept: list[torch.Tensor] = []
    x = tf.constant([1.0, 2.0])
    wrap(lambda a: kept.append(a.detach()) or a * 2)(x)
    kept[0].zero_()
    equal(x, [1, 2])


@in_tf("wrong")
def torch_writes_to_its_state_after_returning_it(wrap: Wrap) -> None:
    weight = torch.ones(3)
    y = wrap(lambda a: (a * 2, weight))(tf.ones(3))[1]
    weight.mul_(5)
    equal(y, [1, 1, 1])


@in_tf("wrong")
def torch_returns_the_same_buffer_at_every_call(wrap: Wrap) -> None:
    buffer = torch.empty(3)
    wrapped = wrap(lambda a: torch.add(a.detach(), 1, out=buffer))
    first = wrapped(tf.zeros(3))
    wrapped(tf.ones(3))
    equal(first, [1, 1, 1])


@in_tf("wrong")
def torch_keeps_its_result_and_writes_to_it_later(wrap: Wrap) -> None:
    kept: list[torch.Tensor] = []
    y = wrap(lambda a: kept.append((a * 2).detach()) or kept[-1])(tf.ones(3))
    kept[0].zero_()
    equal(y, [2, 2, 2])


@in_tf("wrong")
def torch_keeps_a_view_of_its_result_and_writes_to_it_later(wrap: Wrap) -> None:
    kept: list[torch.Tensor] = []

    def fn(a: torch.Tensor) -> torch.Tensor:
        y = a.detach() * 2
        kept.append(y[1:])
        return y

    y = wrap(fn)(tf.ones(3))
    kept[0].zero_()
    equal(y, [2, 2, 2])


class WritesToItsCotangent(torch.autograd.Function):
    """y = 2x, whose backward works in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct.mul_(2)


@in_tf("wrong")
def torch_writes_to_a_cotangent(wrap: Wrap) -> None:
    x, ct = tf.constant([1.0, 2.0]), tf.constant([1.0, 1.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = wrap(WritesToItsCotangent.apply)(x)
    for _ in range(3):
        equal(tape.gradient(y, x, output_gradients=ct), [2, 2])
    equal(ct, [1, 1])


@in_tf("wrong")
def torch_keeps_a_gradient_and_writes_to_it_later(wrap: Wrap) -> None:
    kept: list[torch.Tensor] = []

    def fn(a: torch.Tensor) -> torch.Tensor:
        if a.requires_grad:
            a.register_hook(lambda g: kept.append(g) or g)
        return a * 2

    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = wrap(fn)(x)
    gradient = tape.gradient(y, x)
    kept[0].zero_()
    equal(gradient, [2, 2])


def _grad(y: torch.Tensor, x: torch.Tensor, ct: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, x, ct)
