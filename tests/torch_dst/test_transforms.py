"""Compositions of torch's function transforms, against the same ones of native functions."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import polybridge
from tests.torch_dst.compositions import COMPOSITIONS, FUNCTIONS, total
from tests.torch_dst.sources import TENSORFLOW, native, values, wrapped

pytestmark = [
    pytest.mark.filterwarnings("ignore::polybridge.LoopWarning"),  # of toy; `test_vmap.py` asks for it
    pytest.mark.usefixtures("all_freed"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_composition(source, composition, function):
    x, transform = values(3), COMPOSITIONS[composition]
    found = transform(wrapped(source, FUNCTIONS[function]))(x)
    torch.testing.assert_close(found, transform(native(FUNCTIONS[function]))(x))


@pytest.mark.parametrize("composition", ["grad", "jacrev", "jacfwd", "hessian", "vmap", "vmap of grad"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_shape(source, composition, shape):
    x, transform = values(*shape), COMPOSITIONS[composition]
    found = transform(wrapped(source, FUNCTIONS["mixing"]))(x)
    torch.testing.assert_close(found, transform(native(FUNCTIONS["mixing"]))(x))


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
def test_argnums(source, transform, argnums):
    def fn(m, w, x):
        return m.matmul(w, x) * m.sum(x * x)

    args = values(2, 3), values(3, seed=1)
    found = transform(wrapped(source, fn), argnums=argnums)(*args)
    torch.testing.assert_close(found, transform(native(fn), argnums=argnums)(*args))


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
def test_an_unused_input_has_zeros(source, transform):
    found = transform(wrapped(source, lambda m, x, y: m.sin(x)), argnums=1)(values(2), values(3))
    assert not torch.stack([t.sum() for t in torch.utils._pytree.tree_leaves(found)]).any()


@pytest.mark.parametrize("transform", [jacrev, jacfwd, vmap], ids=lambda t: t.__name__)
def test_structured_results(source, transform):
    def fn(m, x):
        return {"a": m.sin(x), "b": (m.exp(x), m.sum(x))}

    found = transform(wrapped(source, fn))(values(3))
    torch.testing.assert_close(found, transform(native(fn))(values(3)))


def test_an_integer_result_beside_a_gradient(source):
    def fn(m, x):
        return m.sum(m.sin(x)), m.count(x)

    found = grad(wrapped(source, fn), has_aux=True)(values(3))
    torch.testing.assert_close(found, grad(native(fn), has_aux=True)(values(3)))


def test_an_integer_result_of_a_batch(source):
    found = vmap(wrapped(source, lambda m, x: (m.sin(x), m.count(x))))(values(5, 3))[1]
    assert found.tolist() == [[3, 4]] * 5


def test_an_integer_input(tensorflow):
    import tensorflow as tf

    x, index = values(2, 4), torch.tensor([[0, 3], [1, 1]])
    f = polybridge.wrap(lambda x, i: tf.sin(tf.gather(x, i)), src="tf", dst="torch")
    found = vmap(jacrev(f))(x, index)
    torch.testing.assert_close(found, vmap(jacrev(lambda x, i: x[i].sin()))(x, index))


@pytest.mark.parametrize("transform", [grad, vmap, lambda f: vmap(grad(f))], ids=["grad", "vmap", "vmap of grad"])
def test_complex(source, transform):
    def fn(m, z):
        return m.sum(z * m.conj(z) * z * m.conj(z))

    def real(f):
        return lambda z: f(z).real

    z = torch.complex(values(2, 3), values(2, 3, seed=1))
    torch.testing.assert_close(transform(real(wrapped(source, fn)))(z), transform(real(native(fn)))(z))


def test_keyword_and_static_arguments(source):
    def fn(m, x, *, power, scale):
        return m.sin(x) * scale["s"] if power == "odd" else m.exp(x)

    options = {"power": "odd", "scale": {"s": values(3, seed=2)}}
    found = jacrev(lambda x: wrapped(source, fn)(x, **options))(values(3))
    torch.testing.assert_close(found, jacrev(lambda x: native(fn)(x, **options))(values(3)))


# torch.autograd.forward_ad.


def test_forward_mode(source):
    x, t = values(3), values(3, seed=1)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(wrapped(source, FUNCTIONS["mixing"])(forward_ad.make_dual(x, t)))
    torch.testing.assert_close((y.primal, y.tangent), jvp(native(FUNCTIONS["mixing"]), (x,), (t,)))


def test_forward_over_reverse(source):
    f, x, t = wrapped(source, FUNCTIONS["mixing"]), values(3).requires_grad_(), values(3, seed=1)
    with forward_ad.dual_level():
        (g,) = torch.autograd.grad(f(forward_ad.make_dual(x, t)).sum(), x, create_graph=True)
        found = forward_ad.unpack_dual(g).tangent
    torch.testing.assert_close(found, hessian(total(native(FUNCTIONS["mixing"])))(x.detach()) @ t)


def test_forward_mode_beside_an_input_without_a_tangent(source):
    x, t, w = values(3), values(3, seed=1), values(3, seed=2)
    with forward_ad.dual_level():
        y = wrapped(source, lambda m, x, w: m.sin(x) * w)(forward_ad.make_dual(x, t), w)
        found = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(found, x.cos() * w * t)


# Modules.


class Net(torch.nn.Module):
    """A torch layer around a foreign function."""

    def __init__(self, activation):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(3, 4, dtype=torch.float64), torch.nn.Linear(4, 1, dtype=torch.float64)
        self.activation = activation

    def forward(self, x):
        return self.outer(self.activation(self.inner(x)))


def _nets(source, count=1):
    torch.manual_seed(0)
    theirs = [Net(wrapped(source, FUNCTIONS["elementwise"])) for _ in range(count)]
    ours = [Net(native(FUNCTIONS["elementwise"])) for _ in range(count)]
    for a, b in zip(theirs, ours, strict=True):
        b.load_state_dict(a.state_dict())
    return theirs, ours


def _loss(net):
    return lambda params, x, y: (functional_call(net, params, (x,)) - y).pow(2).sum()


def test_functional_call(source):
    (theirs,), (ours,) = _nets(source)
    params, x = {k: v.detach() for k, v in theirs.named_parameters()}, values(5, 3)
    torch.testing.assert_close(grad(_loss(theirs))(params, x, 1.0), grad(_loss(ours))(params, x, 1.0))


def test_per_sample_gradients(source):
    (theirs,), (ours,) = _nets(source)
    params, batch = {k: v.detach() for k, v in theirs.named_parameters()}, (values(5, 3), values(5, seed=1))
    found, expected = (vmap(grad(_loss(net)), (None, 0, 0))(params, *batch) for net in (theirs, ours))
    torch.testing.assert_close(found, expected)


def test_training_by_per_sample_gradients(source):
    trained = []
    for (net,) in _nets(source):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            params = {k: v.detach() for k, v in net.named_parameters()}
            gradients = vmap(grad(_loss(net)), (None, 0, 0))(params, values(5, 3, seed=step), values(5, seed=step))
            for name, parameter in net.named_parameters():
                parameter.grad = gradients[name].clamp(-1, 1).mean(0)
            optimizer.step()
        trained.append(net.state_dict())
    torch.testing.assert_close(*trained)


def test_an_ensemble(source):
    theirs, ours = _nets(source, 3)
    x, found = values(5, 3), []
    for nets in (theirs, ours):
        params, buffers = stack_module_state(nets)
        base = nets[0]
        found.append(
            vmap(lambda p, b, x, base=base: functional_call(base, (p, b), (x,)), (0, 0, None))(params, buffers, x)
        )
    torch.testing.assert_close(*found)


# Counts and lifetimes.


@pytest.mark.parametrize("composition", ["grad", "jacrev", "hessian", "vmap", "vmap of grad", "vmap of hessian"])
def test_the_function_runs_once(composition):
    runs = []

    def fn(m, x):
        runs.append(1)
        return m.sin(x) * x

    COMPOSITIONS[composition](wrapped(TENSORFLOW, fn))(values(3))
    assert len(runs) == 1


def test_residuals_do_not_pile_up(source):
    from polybridge.core import residuals

    f = vmap(grad(total(wrapped(source, FUNCTIONS["mixing"]))))
    x, before, most = values(2, 3), len(residuals._residuals), 0
    for _ in range(500 if source.name == "tensorflow" else 50):
        f(x)
        most = max(most, len(residuals._residuals))
    assert most - before <= 2
