"""vmap: axes, the source's own vectorisation, and the loop where there is none."""

import pytest
import tensorflow as tf
import torch
from torch.func import grad, jacrev, vmap

import polybridge
from tests.torch_dst.sources import TENSORFLOW, TOY, native, values, wrapped

ignoring_loops = pytest.mark.filterwarnings("ignore::polybridge.LoopWarning")


def product(m, x, y):
    """Takes one example of each."""
    return m.sin(x) * m.sum(y)


def normalised(m, x):
    """Normalises over its whole input, which is one example."""
    return x / m.sum(x * x)


@ignoring_loops
@pytest.mark.parametrize("in_dims", [0, 1, -1, (0, 1), (1, None), (None, 0), (-2, -1)], ids=str)
@pytest.mark.parametrize("out_dims", [0, 1, -1], ids=str)
def test_axes(source, in_dims, out_dims):
    args = [values(4, 4), values(4, 4, seed=1)]
    found = vmap(wrapped(source, product), in_dims, out_dims)(*args)
    torch.testing.assert_close(found, vmap(native(product), in_dims, out_dims)(*args))


@ignoring_loops
def test_axes_of_a_tree(source):
    def fn(m, batch):
        return {"y": m.sin(batch["x"]) * batch["w"][0]}

    batch, in_dims = {"x": values(3, 5), "w": [values(3)]}, ({"x": 1, "w": [None]},)
    found = vmap(wrapped(source, fn), in_dims, out_dims={"y": 1})(batch)
    torch.testing.assert_close(found, vmap(native(fn), in_dims, out_dims={"y": 1})(batch))


@ignoring_loops
def test_a_function_that_normalises_over_its_input_gives_results_of_each_example(source):
    x = values(5, 3)
    torch.testing.assert_close(vmap(wrapped(source, normalised))(x), x / (x * x).sum(1, keepdim=True))


@ignoring_loops
def test_gradients_of_a_function_that_normalises_over_its_input(source):
    x = values(5, 3)
    found = vmap(jacrev(wrapped(source, normalised)))(x)
    torch.testing.assert_close(found, torch.stack([jacrev(native(normalised))(row) for row in x]))


@ignoring_loops
def test_under_plain_autograd(source):
    x, y = values(5, 3).requires_grad_(), values(3, seed=1).requires_grad_()
    found = torch.autograd.grad(vmap(wrapped(source, product), (0, None))(x, y).pow(2).sum(), (x, y))
    expected = torch.autograd.grad(vmap(native(product), (0, None))(x, y).pow(2).sum(), (x, y))
    torch.testing.assert_close(found, expected)


@ignoring_loops
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
def test_chunks(source, chunk_size):
    x, y = values(5, 3), values(5, 3, seed=1)
    found = vmap(wrapped(source, product), chunk_size=chunk_size)(x, y)
    torch.testing.assert_close(found, vmap(native(product))(x, y))


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_random_numbers_of_the_source_differ_from_example_to_example(tensorflow, randomness):
    """The option is about torch's own generator; TensorFlow's vectorisation draws for each example."""
    f = wrapped(tensorflow, lambda m, x: x * tf.random.uniform([1000], dtype=x.dtype))
    a, b = vmap(f, randomness=randomness)(torch.ones(2, 1000, dtype=torch.float64))
    assert not torch.equal(a, b)


def test_a_dropout_mask_is_that_of_the_forward_in_each_example(tensorflow):
    f = wrapped(tensorflow, lambda m, x: tf.nn.dropout(x, 0.5) * x)
    gradients, values_ = vmap(lambda x: torch.func.grad_and_value(lambda x: f(x).sum())(x))(torch.ones(3, 100))
    torch.testing.assert_close(gradients.sum(1) / 2, values_)


def test_the_function_runs_once_for_a_batch():
    runs = []

    def fn(m, x):
        runs.append(1)
        return m.sin(x)

    f = wrapped(TENSORFLOW, fn)
    for _ in range(3):  # TensorFlow traces it once
        vmap(f)(values(100, 3))
    assert len(runs) == 1


# The loop.


def _with_numpy(m, x):
    return m.sin(x) * float(x.numpy().max())


def _with_a_callback(m, x):
    return m.sin(x) * tf.stop_gradient(tf.reduce_max(tf.py_function(lambda x: x.numpy(), [x], x.dtype)))


def _by_hand(x):
    return x.sin() * x.detach().max()


@pytest.mark.parametrize("fn", [_with_numpy], ids=lambda fn: fn.__name__.strip("_"))
def test_a_function_that_cannot_be_vectorised(fn):
    x = values(4, 3)
    with pytest.warns(polybridge.LoopWarning, match="one example of a batch after the other"):
        found = vmap(wrapped(TENSORFLOW, fn))(x)
    torch.testing.assert_close(found, torch.stack(list(map(_by_hand, x))))


@ignoring_loops
def test_a_callback_of_tensorflow_in_a_batch():
    x = values(4, 3)
    torch.testing.assert_close(vmap(wrapped(TENSORFLOW, _with_a_callback))(x), torch.stack(list(map(_by_hand, x))))


@ignoring_loops
@pytest.mark.parametrize("transform", [grad, lambda f: grad(grad(f))], ids=["grad", "grad of grad"])
def test_derivatives_of_the_loop(transform):
    x = values(4)
    found = vmap(transform(wrapped(TENSORFLOW, lambda m, x: m.sin(x) * float(x.numpy()))))(x)
    torch.testing.assert_close(found, torch.stack([transform(lambda y, c=row: y.sin() * c)(row) for row in x]))


def test_the_loop_is_told_once():
    f = wrapped(TENSORFLOW, _with_numpy)
    with pytest.warns(polybridge.LoopWarning) as told:
        for _ in range(3):
            vmap(f)(values(4, 3))
        vmap(grad(lambda x: f(x).sum()))(values(4, 3))
    assert len([w for w in told if w.category is polybridge.LoopWarning]) == 1


def test_nested_loops_are_told_once():
    with pytest.warns(polybridge.LoopWarning) as told:
        vmap(vmap(wrapped(TOY, lambda m, x: m.sin(x))))(values(4, 3))
    assert len([w for w in told if w.category is polybridge.LoopWarning]) == 1


def test_the_warning_points_at_the_call():
    f = wrapped(TOY, lambda m, x: m.sin(x))
    with pytest.warns(polybridge.LoopWarning) as told:
        vmap(lambda x: f(x))(values(4, 3))
    assert told[0].filename == __file__


@pytest.mark.parametrize("error", [KeyError, ZeroDivisionError, ValueError])
def test_an_exception_of_the_function_keeps_its_type(source, error):
    def fn(m, x):
        raise error("mine")

    with pytest.raises(error, match="mine"):
        vmap(wrapped(source, fn))(values(4, 3))


def test_an_exception_in_some_examples_only(tensorflow):
    def fn(m, x):
        if x.numpy() > 2:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine"):
        vmap(wrapped(tensorflow, fn))(torch.arange(4.0))


def test_a_batch_of_no_examples_has_results_of_none():
    def everything(f):
        x = torch.zeros(0, 3)
        total = lambda x: f(x).sum()  # noqa: E731
        mapped = [torch.func.vmap(g)(x) for g in (f, torch.func.grad(total), torch.func.jacfwd(f))]
        return [*mapped, torch.func.jacrev(f)(torch.zeros(0)), torch.func.jacfwd(f)(torch.zeros(0))]

    found = everything(polybridge.wrap(tf.sin, src="tf", dst="torch"))
    for y, expected in zip(found, everything(torch.sin), strict=True):
        torch.testing.assert_close(y, expected)


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_a_function_of_jax_that_asks_for_values_has_batches_where_nobody_differentiates(grad):
    f, x = polybridge.wrap(lambda x: x * float(x.sum()), src="jax", dst="torch"), values(2, 3).float()
    with torch.set_grad_enabled(grad):
        with pytest.warns(polybridge.LoopWarning):
            found = vmap(f)(x)
        torch.testing.assert_close(found, x * x.sum(1, keepdim=True))
        torch.testing.assert_close(vmap(vmap(f))(x[None])[0], found)


@ignoring_loops
@pytest.mark.parametrize("outer", [False, True], ids=["inside", "outside"])
def test_a_batch_is_followed_where_somebody_differentiates(source, outer):
    found = []
    for f in (native(lambda m, x: m.sin(x) * x), wrapped(source, lambda m, x: m.sin(x) * x)):
        x = values(2, 3).requires_grad_(outer)
        y = vmap(f)(x) if outer else vmap(grad(lambda x, f=f: f(x).sum()))(x)
        found.append(torch.autograd.grad(y.sum(), x)[0] if outer else y)
    torch.testing.assert_close(*found)
