"""Asks torch's own judges of a toy function in torch, and what only torch has."""

import pytest
import torch
import toy

import polybridge

F64 = {"dtype": torch.float64, "requires_grad": True}


@pytest.fixture
def f():
    """Matrices, broadcasting, indexing, and every elementwise rule of toy."""

    @polybridge.wrap(src="toy", dst="torch")
    def f(x, w):
        y = toy.sin(x @ w) / (toy.exp(w[0]) + 2) - toy.log(w[1:] ** 2) ** 3 + toy.cos(x[:, :2])
        return y.reshape(-1), (y * y).sum(0)

    return f


@pytest.fixture
def inputs():
    x = torch.tensor([[0.3, -0.5, 1.1], [0.7, 0.2, -0.4]], **F64)
    w = torch.tensor([[0.6, 1.2], [1.5, 0.4], [0.8, 2.1]], **F64)
    return x, w


def test_gradcheck(f, inputs):
    assert torch.autograd.gradcheck(f, inputs)


def test_gradgradcheck(f, inputs):
    assert torch.autograd.gradgradcheck(f, inputs)


def test_gradcheck_of_complex_numbers():
    f = polybridge.wrap(lambda z: toy.sin(z) * toy.conj(z) / (z + 2), src="toy", dst="torch")
    z = torch.tensor([0.3 + 0.4j, -0.2 + 1j], dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(f, z)
    assert torch.autograd.gradgradcheck(f, z)


def test_gradients_accumulate():
    f = polybridge.wrap(lambda x: 3 * x, src="toy", dst="torch")
    x = torch.tensor(2.0, requires_grad=True)
    f(x).backward()
    f(x).backward()
    assert x.grad == 6.0


def test_two_gradients_do_not_share_memory():
    f = polybridge.wrap(lambda x, w: x + w, src="toy", dst="torch")
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    f(x, w).sum().backward()
    x.grad.zero_()
    assert w.grad.tolist() == [1.0, 1.0]


def test_writing_to_a_result_changes_nothing_else():
    f = polybridge.wrap(lambda x: x, src="toy", dst="torch")
    x = torch.ones(2)
    f(x).add_(5.0)
    assert x.tolist() == [1.0, 1.0]
    assert f(x).tolist() == [1.0, 1.0]


def test_writing_to_an_input_after_the_forward_is_torchs_own_error():
    f = polybridge.wrap(lambda x: x**2, src="toy", dst="torch")
    x = torch.ones(2, requires_grad=True)
    inner = x * 1
    y = f(inner).sum()
    inner.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_without_grad_nothing_is_recorded():
    f = polybridge.wrap(lambda x: x**2, src="toy", dst="torch")
    with torch.no_grad():
        assert not f(torch.ones(2, requires_grad=True)).requires_grad


def test_only_inputs_that_require_grad_have_one():
    f = polybridge.wrap(lambda x, w: x * w, src="toy", dst="torch")
    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    f(x, w).sum().backward()
    assert w.grad is None
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_graph_that_was_freed_says_so_in_torchs_words():
    f = polybridge.wrap(lambda x: x**2, src="toy", dst="torch")
    y = f(torch.ones(2, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_hessian(inputs):
    f = polybridge.wrap(lambda x: (x**3).sum(), src="toy", dst="torch")
    hessian = torch.autograd.functional.hessian(f, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert hessian.tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_training_a_toy_model_with_a_torch_optimiser():
    """Least squares of y = 2 x + 1 on four points, by plain gradient descent."""

    @polybridge.wrap(src="toy", dst="torch")
    def loss(w, b, x, y):
        return ((x * w + b - y) ** 2).sum() / 4

    w, b = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    optimiser = torch.optim.SGD([w, b], lr=0.2)
    for _ in range(150):
        optimiser.zero_grad()
        loss(w, b, x, 2 * x + 1).backward()
        optimiser.step()
    assert (w.item(), b.item()) == pytest.approx((2.0, 1.0), abs=1e-4)


def test_a_random_function_is_not_differentiated_by_drawing_again():
    """A plain callable as a pullback can be differentiated by a second run only, which would draw another mask."""
    masks = iter([2.0, 30.0])
    f = polybridge.wrap(lambda x: x * next(masks), src="toy", dst="torch")
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(polybridge.NotDifferentiableError, match="other values when it was run again"):
        torch.autograd.grad(f(x), x, create_graph=True)
