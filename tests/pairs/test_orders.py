"""Asks for every order of derivative, by every means that the calling framework has."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge

DERIVATIVES = [32.0, 80.0, 160.0, 240.0, 240.0, 120.0, 0.0]  # of x**5 at 2, from the zeroth to the sixth


def to_torch(fn):
    return polybridge.wrap(fn, src="tensorflow", dst="torch")


def to_tf(fn):
    return polybridge.wrap(fn, src="torch", dst="tensorflow")


# Every pair.


@pytest.mark.parametrize("order", range(1, 6))
def test_derivatives_of_a_power_to_the_fifth_order(pair, dst, order):
    derived = pair.wrap(lambda x: x**5)
    for _ in range(order):
        derived = dst.derivative(derived)
    assert float(dst.numpy(derived(dst.tensor(2.0, "float64")))) == pytest.approx(DERIVATIVES[order], rel=1e-12)


@pytest.mark.parametrize("order", range(1, 5))
def test_derivatives_of_sine_cycle(pair, src, dst, order):
    derived = pair.wrap(src.sin)
    for _ in range(order):
        derived = dst.derivative(derived)
    x = np.array([0.3, 1.1])
    np.testing.assert_allclose(dst.numpy(derived(dst.tensor(x))), np.sin(x + order * np.pi / 2), rtol=1e-12)


def test_the_user_function_runs_once_whatever_the_order(pair, src, dst):
    calls = []
    derived = pair.wrap(lambda x: calls.append(1) or x**5)
    for _ in range(3):
        derived = dst.derivative(derived)
    if src.traces:  # a pure function, once for each order that is prepared
        derived(dst.tensor(2.0, "float64"))
        assert len(calls) <= 4
        calls.clear()
    derived(dst.tensor(2.0, "float64"))
    assert len(calls) == (0 if src.traces else 1)


def test_second_derivative_through_a_native_product(pair, dst):
    """Case 41: f(x) x with f = x^3."""
    wrapped = pair.wrap(lambda x: x**3)
    second = dst.derivative(dst.derivative(lambda x: wrapped(x) * x))
    assert float(dst.numpy(second(dst.tensor(2.0, "float64")))) == 48.0


def test_second_derivative_of_native_wrapped_native(pair, src, dst):
    wrapped = pair.wrap(lambda x: x**3)
    second = dst.derivative(dst.derivative(lambda x: dst.square(wrapped(dst.square(x)))))  # x^12
    assert float(dst.numpy(second(dst.tensor(1.5, "float64")))) == pytest.approx(132 * 1.5**10, rel=1e-12)


def test_second_derivative_of_wrapped_in_wrapped(pair, src, dst):
    f, g = pair.wrap(lambda x: x**2), pair.wrap(lambda x: x**3)
    second = dst.derivative(dst.derivative(lambda x: g(f(x))))  # x^6
    assert float(dst.numpy(second(dst.tensor(2.0, "float64")))) == 30 * 2**4


def test_second_derivative_there_and_back_again(pair, src, dst):
    """dst -> src -> dst."""
    inner = pair.reversed().wrap(lambda x: x**3)
    wrapped = pair.wrap(lambda x: inner(x) * x)
    assert float(dst.numpy(dst.derivative(dst.derivative(wrapped))(dst.tensor(2.0, "float64")))) == 48.0


def test_derivative_taken_inside_the_function_is_differentiated(pair, src, dst):
    wrapped = pair.wrap(src.derivative(lambda x: x**4))
    assert float(dst.numpy(dst.derivative(wrapped)(dst.tensor(2.0, "float64")))) == 48.0


def test_second_derivative_of_a_linear_function_is_zero_or_none(pair, dst):
    wrapped = pair.wrap(lambda x: x * 3.0)
    second = dst.derivative(lambda x: dst.derivative(wrapped)(x) + x)
    assert float(dst.numpy(second(dst.tensor(2.0, "float64")))) == 1.0


def test_mixed_second_derivative(pair, src, dst):
    """d2/dx dy of x^2 y^3 at (2, 3)."""
    wrapped, y = pair.wrap(lambda x, y: x**2 * y**3), dst.tensor(3.0, "float64")
    mixed = dst.derivative(lambda y: dst.derivative(lambda x: wrapped(x, y))(dst.tensor(2.0, "float64")))
    assert float(dst.numpy(mixed(y))) == 6 * 2 * 9


def test_second_derivative_of_several_outputs(pair, dst):
    wrapped = pair.wrap(lambda x: {"a": x**2, "b": [x**3, 7]})

    def total(x):
        found = wrapped(x)
        return found["a"] * found["b"][0]

    assert float(dst.numpy(dst.derivative(dst.derivative(total))(dst.tensor(2.0, "float64")))) == 20 * 8


def test_second_derivative_with_an_integer_output_beside(pair, src, dst):
    wrapped = pair.wrap(lambda x: (src.argmax(x), x**3))
    second = dst.derivative(dst.derivative(lambda x: wrapped(x)[1]))
    assert dst.numpy(second(dst.tensor([1.0, 2.0], "float64"))).tolist() == [6.0, 12.0]


def test_complex_second_derivative_is_native(pair, src, dst):
    def loss(m, f):
        return lambda z: m.real(f(z) * (1 - 2j))

    x = np.array([1 + 2j, -0.5j])
    cubes = pair.wrap(lambda z: z * z * z), lambda z: z * z * z
    seconds = (dst.derivative(lambda z, f=f: dst.abs(dst.derivative(loss(dst, f))(z))) for f in cubes)
    found, native = (dst.numpy(second(dst.tensor(x))) for second in seconds)
    np.testing.assert_allclose(found, native, rtol=1e-13)


def test_gradient_penalty_of_native_and_wrapped_terms(pair, src, dst):
    """d/dw of (d/dx [w x^2 + sin(w) x])^2 with the first term wrapped, the second native."""
    wrapped = pair.wrap(lambda w, x: w * x**2)
    x = dst.tensor(1.5, "float64")

    def penalty(w):
        return dst.square(dst.derivative(lambda x: wrapped(w, x) + dst.sin(w) * x)(x))

    w = 0.7
    expected = 2 * (2 * w * 1.5 + np.sin(w)) * (3 + np.cos(w))
    assert float(dst.numpy(dst.derivative(penalty)(dst.tensor(w, "float64")))) == pytest.approx(expected, rel=1e-12)


# torch's means.


def test_torch_create_graph_gives_a_gradient_that_can_be_differentiated():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(to_torch(lambda x: x**3)(x).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad.tolist() == [6.0, 12.0]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_torch_backward_with_create_graph_leaves_a_graph_on_grad():
    x = torch.tensor(2.0, requires_grad=True)
    to_torch(lambda x: x**3)(x).backward(create_graph=True)
    assert torch.autograd.grad(x.grad, x)[0].item() == 12.0


def test_torch_without_create_graph_gives_a_constant():
    x = torch.tensor(2.0, requires_grad=True)
    (first,) = torch.autograd.grad(to_torch(lambda x: x**3)(x), x)
    assert first.item() == 12.0 and not first.requires_grad


def test_torch_retain_graph_allows_a_second_backward():
    x = torch.tensor(2.0, requires_grad=True)
    y = to_torch(lambda x: x**3)(x)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 24.0


def test_torch_second_backward_without_retain_graph_is_torchs_own_error():
    x = torch.tensor(2.0, requires_grad=True)
    y = to_torch(lambda x: x**3)(x)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_torch_functional_hessian():
    hessian = torch.autograd.functional.hessian(to_torch(lambda x: tf.reduce_sum(x**3)), torch.tensor([1.0, 2.0]))
    assert hessian.tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_torch_functional_jacobian():
    jacobian = torch.autograd.functional.jacobian(to_torch(lambda x: x**3), torch.tensor([2.0, 3.0]))
    assert jacobian.tolist() == [[12.0, 0.0], [0.0, 27.0]]


def test_torch_functional_jacobian_of_several_inputs_that_is_differentiated():
    fn = to_torch(lambda a, b: a * b)
    a, b = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0])
    in_a, in_b = torch.autograd.functional.jacobian(fn, (a, b), create_graph=True)
    assert in_a.tolist() == [[5.0, 0.0], [0.0, 7.0]]
    in_b.sum().backward()
    assert a.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("product", ["vjp", "jvp", "vhp", "hvp"])
def test_torch_functional_products(product):
    x, v = torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
    fn = to_torch(lambda x: x**3 if product in ("vjp", "jvp") else tf.reduce_sum(x**3))
    _, found = getattr(torch.autograd.functional, product)(fn, x, v)
    assert found.tolist() == ([12.0, -27.0] if product in ("vjp", "jvp") else [12.0, -18.0])


def test_torch_is_grads_batched():
    """Case 46."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (found,) = torch.autograd.grad(to_torch(lambda x: x**3)(x), x, torch.eye(2), is_grads_batched=True)
    assert found.tolist() == [[12.0, 0.0], [0.0, 27.0]]


def test_torch_functional_jacobian_vectorized():
    fn = to_torch(lambda x: x**3)
    jacobian = torch.autograd.functional.jacobian(fn, torch.tensor([2.0, 3.0]), vectorize=True)
    assert jacobian.tolist() == [[12.0, 0.0], [0.0, 27.0]]


def test_torch_gradients_of_intermediate_tensors():
    x = torch.tensor(2.0, requires_grad=True)
    middle = x * 3
    middle.retain_grad()
    to_torch(lambda x: x**2)(middle).backward()
    assert (middle.grad.item(), x.grad.item()) == (12.0, 36.0)


def test_torch_hooks_see_the_cotangents():
    x, seen = torch.tensor(2.0, requires_grad=True), []
    y = to_torch(lambda x: x**2)(x)
    y.register_hook(lambda ct: seen.append(ct.item()) or ct * 10)
    y.backward(torch.tensor(3.0))
    assert (seen, x.grad.item()) == ([3.0], 120.0)


def test_torch_no_grad_and_inference_mode_give_constants():
    x, fn = torch.tensor(2.0, requires_grad=True), to_torch(lambda x: x**2)
    with torch.no_grad():
        assert not fn(x).requires_grad
    with torch.inference_mode():
        assert fn(x).item() == 4.0
    assert fn(x).requires_grad


def test_torch_checkpoint_recomputes_the_wrapped_function():
    x = torch.tensor(2.0, requires_grad=True)
    torch.utils.checkpoint.checkpoint(to_torch(lambda x: x**3), x, use_reentrant=False).backward()
    assert x.grad.item() == 12.0


# TensorFlow's means.


def test_tf_nested_tapes():
    x = tf.Variable(2.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = to_tf(lambda x: x**3)(x)
        first = inner.gradient(y, x)
    assert (first.numpy(), outer.gradient(first, x).numpy()) == (12.0, 12.0)


def test_tf_persistent_tape_gives_gradients_more_than_once():
    x = tf.Variable(2.0)
    with tf.GradientTape(persistent=True) as tape:
        y = to_tf(lambda x: x**3)(x)
        z = y * x
    assert [tape.gradient(t, x).numpy() for t in (y, y, z, z)] == [12.0, 12.0, 32.0, 32.0]


def test_tf_gradient_of_an_intermediate_tensor():
    x = tf.Variable(2.0)
    with tf.GradientTape(persistent=True) as tape:
        middle = x * 3.0
        y = to_tf(lambda x: x**2)(middle)
    assert (tape.gradient(y, middle).numpy(), tape.gradient(y, x).numpy()) == (12.0, 36.0)


def test_tf_output_gradients_are_used():
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = to_tf(lambda x: x**2)(x)
    assert tape.gradient(y, x, output_gradients=tf.constant([1.0, 10.0])).numpy().tolist() == [4.0, 60.0]


@pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])
def test_tf_jacobian(pfor):
    """Case 47."""
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch(x)
        y = to_tf(lambda x: x**3)(x)
    assert tape.jacobian(y, x, experimental_use_pfor=pfor).numpy().tolist() == [[12.0, 0.0], [0.0, 27.0]]


@pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])
def test_tf_jacobian_in_two_inputs_of_a_matrix_product(pfor):
    a, b = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [5.0]])
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch([a, b])
        y = to_tf(lambda a, b: torch.cat([a @ b, 2 * a @ b]))(a, b)
    in_a, in_b = tape.jacobian(y, [a, b], experimental_use_pfor=pfor)
    assert in_a.numpy().reshape(2, 2).tolist() == [[3.0, 5.0], [6.0, 10.0]]
    assert in_b.numpy().reshape(2, 2).tolist() == [[1.0, 2.0], [2.0, 4.0]]


@pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])
def test_tf_batch_jacobian(pfor):
    x = tf.constant([[2.0, 3.0], [4.0, 5.0]])
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch(x)
        y = to_tf(lambda x: x**2 + x.sum(1, keepdim=True))(x)
    found = tape.batch_jacobian(y, x, experimental_use_pfor=pfor)
    assert found.numpy().tolist() == [[[5.0, 1.0], [1.0, 7.0]], [[9.0, 1.0], [1.0, 11.0]]]


@pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])
def test_tf_hessian_by_jacobian_of_gradient(pfor):
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape(persistent=not pfor) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = to_tf(lambda x: (x**3).sum() + x[0] * x[1])(x)
        gradient = inner.gradient(y, x)
    assert outer.jacobian(gradient, x, experimental_use_pfor=pfor).numpy().tolist() == [[12.0, 1.0], [1.0, 18.0]]


def test_tf_forward_accumulator():
    x = tf.constant([2.0, 3.0])
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, -1.0])) as accumulator:
        y = to_tf(lambda x: x**3)(x)
    assert accumulator.jvp(y).numpy().tolist() == [12.0, -27.0]


def test_tf_forward_over_reverse():
    x = tf.constant([2.0, 3.0])
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, -1.0])) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = to_tf(lambda x: (x**3).sum())(x)
        gradient = tape.gradient(y, x)
    assert accumulator.jvp(gradient).numpy().tolist() == [12.0, -18.0]


def test_tf_forward_over_forward():
    x = tf.constant(2.0)
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as outer:
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as inner:
            y = to_tf(lambda x: x**3)(x)
        first = inner.jvp(y)
    assert (first.numpy(), outer.jvp(first).numpy()) == (12.0, 12.0)


def test_tf_reverse_over_forward():
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = to_tf(lambda x: x**3)(x)
        first = accumulator.jvp(y)
    assert tape.gradient(first, x).numpy() == 12.0


def test_tf_stop_recording_gives_a_constant():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        with tape.stop_recording():
            y = to_tf(lambda x: x**3)(x)
        z = y * x
    assert tape.gradient(z, x).numpy() == 8.0


def test_tf_tape_that_does_not_watch_gives_none():
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        y = to_tf(lambda x: x**3)(x)
    assert tape.gradient(y, x) is None


def test_tf_custom_gradient_around_a_wrapped_function():
    @tf.custom_gradient
    def tenfold(x):
        y = to_tf(lambda x: x**3)(x)
        return y, lambda ct: 10 * ct

    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = tenfold(x)
    assert (y.numpy(), tape.gradient(y, x).numpy()) == (8.0, 10.0)


def test_tf_recompute_grad_around_a_wrapped_function():
    tf.compat.v1.reset_default_graph()  # a loop that raised elsewhere leaves what `tf.recompute_grad` refuses
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.recompute_grad(to_tf(lambda x: x**3))(x)
    assert tape.gradient(y, x).numpy() == 12.0
