"""torch.compile: one graph, values and gradients as without it, one compilation per signature."""

import dataclasses
import gc
import subprocess
import sys
import threading

import jax
import keras
import pytest
import tensorflow as tf
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import polybridge
from polybridge.core import residuals
from tests.torch_dst.compositions import COMPOSITIONS, FUNCTIONS
from tests.torch_dst.sources import TENSORFLOW, native, values, wrapped

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # `linearize`, of native functions too
]
BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh():
    """The compiler's caches and counters start empty."""
    torch._dynamo.reset()
    counters.clear()


def fn(m, x):
    """Of most tests here."""
    return m.sin(x) * x


def graph(f, **options):
    """Compile without a break."""
    return torch.compile(f, **{"fullgraph": True, "backend": "aot_eager", **options})


def with_gradients(f, *xs):
    """Return the value and the gradients of its sum."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() or x.is_complex() else x for x in xs]
    y = f(*leaves)
    y.sum().abs().backward()
    return y.detach(), [x.grad for x in leaves if x.requires_grad]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_value_and_gradient(source, backend, fullgraph):
    f, g, x = wrapped(source, fn), native(fn), values(3)
    found = with_gradients(graph(lambda x: f(x * 2).cos(), backend=backend, fullgraph=fullgraph), x)
    torch.testing.assert_close(found, with_gradients(lambda x: g(x * 2).cos(), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_dtype(tensorflow, dtype):
    x = values(3).to(dtype)
    found = with_gradients(graph(wrapped(tensorflow, lambda m, x: x * m.sin(x))), x)
    torch.testing.assert_close(found, with_gradients(lambda x: x * x.sin(), x))


def test_there_is_no_break_without_fullgraph():
    f = wrapped(TENSORFLOW, fn)
    graph(lambda x: f(x).cos() + f(x.exp()), fullgraph=False)(values(3))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def test_the_wrapped_function_itself_can_be_compiled():
    x = values(3)
    torch.testing.assert_close(with_gradients(graph(wrapped(TENSORFLOW, fn)), x), with_gradients(native(fn), x))


def test_several_calls_in_a_graph(source):
    f, g, x = wrapped(source, fn), native(fn), values(3)
    found = with_gradients(graph(lambda x: f(f(x).cos()) + f(x)), x)
    torch.testing.assert_close(found, with_gradients(lambda x: g(g(x).cos()) + g(x), x))


def test_several_inputs_of_which_one_needs_no_gradient():
    f, w = wrapped(TENSORFLOW, lambda m, w, x: m.sin(w) * x), values(3)
    x = values(3, seed=1)
    torch.testing.assert_close(with_gradients(graph(lambda w: f(w, x)), w), with_gradients(lambda w: w.sin() * x, w))


def test_an_unused_input_has_no_gradient():
    f = wrapped(TENSORFLOW, lambda m, x, y: m.sin(x))
    x, y = values(3).requires_grad_(), values(3).requires_grad_()
    graph(f)(x, y).sum().backward()
    assert x.grad is not None and y.grad is None


def test_an_integer_input():
    f = polybridge.wrap(lambda x, i: tf.gather(x, i) ** 2, src="tf", dst="torch")
    found = with_gradients(graph(f), values(4), torch.tensor([0, 3, 3]))
    torch.testing.assert_close(found, with_gradients(lambda x, i: x[i] ** 2, values(4), torch.tensor([0, 3, 3])))


def test_an_integer_result():
    f = wrapped(TENSORFLOW, lambda m, x: (m.sin(x), m.count(x)))
    y, count = graph(f)(values(3).requires_grad_())
    assert y.requires_grad and count.tolist() == [3, 4] and not count.requires_grad


def test_structures():
    f = polybridge.wrap(
        lambda batch, *, axis=None, scale=1.0: {"y": [scale * tf.reduce_sum(batch["x"], axis)], "note": "n", "k": axis},
        src="tf",
        dst="torch",
    )
    x = values(2, 3)
    found = graph(lambda x: f({"x": x}, axis=1, scale=2.0))(x)
    torch.testing.assert_close(found["y"], [2 * x.sum(1)])
    assert (found["note"], found["k"]) == ("n", 1)


def test_a_static_value_that_changes():
    f = polybridge.wrap(lambda x, power, mode: x**power if mode == "up" else x, src="tf", dst="torch")
    compiled, x = graph(lambda x, power, mode: f(x, power, mode)), values(3)
    for power, mode in [(2, "up"), (3, "up"), (4, "up"), (2, "none")]:
        torch.testing.assert_close(compiled(x, power, mode), x**power if mode == "up" else x)


def test_a_call_without_tensors_is_not_frozen():
    f = polybridge.wrap(lambda n: tf.random.uniform([n]), src="tf", dst="torch")
    compiled = graph(lambda x: f(1000) + x)
    x = torch.zeros(1000)
    assert not torch.equal(compiled(x), compiled(x))


def test_without_gradients():
    f, before = graph(wrapped(TENSORFLOW, fn)), set(residuals._residuals)
    with torch.no_grad():
        y = f(values(3).requires_grad_())
    assert not y.requires_grad and set(residuals._residuals) <= before


def test_in_inference_mode():
    f, x = graph(wrapped(TENSORFLOW, fn)), values(3)
    with torch.inference_mode():
        torch.testing.assert_close(f(x), native(fn)(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend):
    losses = []
    for activation in (wrapped(TENSORFLOW, fn), native(fn)):
        torch.manual_seed(0)
        net = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)]).double()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def loss(x, y, net=net, activation=activation):
            return (net[1](activation(net[0](x))) - y).pow(2).mean()

        compiled, seen = graph(loss, backend=backend), []
        for step in range(5):
            optimizer.zero_grad()
            value = compiled(values(8, 3, seed=step), values(8, 1, seed=-step))
            value.backward()
            optimizer.step()
            seen.append(value.item())
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1])


# Shapes.

SHAPES = {
    "same": lambda m, x: m.sin(x),
    "rows": lambda m, x: m.rows(x),
    "one less": lambda m, x: m.sin(x)[1:],
    "every second": lambda m, x: m.sin(x)[::2],
    "first column": lambda m, x: m.sin(x)[:, 0],
    "row of a matrix": lambda m, x: m.sin(x)[0],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes(shape, backend):
    counter = CompileCounterWithBackend(backend)
    f, g = wrapped(TENSORFLOW, SHAPES[shape]), native(SHAPES[shape])
    compiled = graph(lambda x: f(x * 2).cos(), dynamic=True, backend=counter)
    for n in (3, 4, 7):
        x = values(n, n + 1)
        torch.testing.assert_close(with_gradients(compiled, x), with_gradients(lambda x: g(x * 2).cos(), x))
    assert counter.frame_count == 1


def test_a_marked_dimension():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = graph(wrapped(TENSORFLOW, fn), backend=counter)
    for n in (3, 4, 7):
        x = values(n, 3)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), native(fn)(x))
    assert counter.frame_count == 1


def test_two_dimensions_that_vary_apart():
    f = wrapped(TENSORFLOW, lambda m, x, y: (m.matmul(x, y), m.rows(y)))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = graph(f, backend=counter, dynamic=True)
    for n, k, p in [(3, 4, 5), (6, 2, 9)]:
        x, y = values(n, k), values(k, p)
        torch.testing.assert_close(compiled(x, y), (x @ y, y.sum(1)))
    assert counter.frame_count == 1


def test_a_size_that_is_a_product():
    f = polybridge.wrap(lambda x: tf.reshape(x, [-1]), src="tf", dst="torch")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = graph(lambda x: f(x).sin(), backend=counter, dynamic=True)
    for n, k in [(3, 4), (6, 2)]:
        found = with_gradients(compiled, values(n, k))
        torch.testing.assert_close(found, with_gradients(lambda x: x.reshape(-1).sin(), values(n, k)))
    assert counter.frame_count == 1


def test_a_function_that_takes_few_sizes_is_compiled_for_each():
    f = polybridge.wrap(lambda x: tf.reshape(x, [4, -1]) * 2.0, src="tf", dst="torch")
    compiled = graph(f)
    for n in (4, 8, 12):
        torch.testing.assert_close(compiled(values(n)), values(n).reshape(4, -1) * 2)


def test_a_size_with_a_bound():
    f = wrapped(TENSORFLOW, lambda m, x: m.sin(x)[:10])
    compiled = graph(f, dynamic=True)
    for n in (3, 4):
        torch.testing.assert_close(compiled(values(n)), values(n).sin())


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_size_that_breaks_the_promise(backend):
    compiled = graph(wrapped(TENSORFLOW, lambda m, x: m.sin(x)[:10]), dynamic=True, backend=backend)
    compiled(values(20))
    with pytest.raises(polybridge.PromisedShapeError, match=r"sizes \[3\].*sizes \[10\]"):
        compiled(values(3))


VECTOR = polybridge.TensorSpec((3,), "float64")
OTHERS = {  # results that compiled code would read as what was promised
    "dtype": (lambda x: tf.cast(x, tf.float32), VECTOR),
    "rank": (lambda x: x[None], VECTOR),
    "ranks of several": (lambda x: (x[None], x[0]), (polybridge.TensorSpec((1,), "float64"), VECTOR)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_result_of_another_kind_than_was_promised(name, gradient):
    fn, specs = OTHERS[name]
    f = polybridge.wrap(fn, src="tf", dst="torch", output_specs=specs)
    with pytest.raises(polybridge.PromisedShapeError, match="was promised"):
        graph(lambda x: f(x)[-1] + 1, backend="inductor")(values(3).requires_grad_(gradient))


def scaled(factor):
    """Return a wrapped function; all of them have one code."""
    return polybridge.wrap(lambda x: x * factor, src="tf", dst="torch")


class Scaled(torch.nn.Module):
    """A layer that holds a wrapped function."""

    def __init__(self, factor):
        super().__init__()
        self.scaled = scaled(factor)

    def forward(self, x):
        """Call it."""
        return self.scaled(x) + 1


def test_functions_of_one_code_have_graphs_of_their_own():
    functions, compiled = [scaled(factor) for factor in (2.0, 3.0, 5.0)], graph(lambda f, x: f(x) + 1)
    for i in (0, 1, 2, 2, 1, 0):
        assert compiled(functions[i], torch.ones(1)).item() == (2, 3, 5)[i] + 1


def test_modules_of_one_class_have_graphs_of_their_own():
    modules = [graph(Scaled(factor)) for factor in (2.0, 3.0, 5.0)]
    for i in (0, 1, 2, 2, 1, 0):
        value, (gradient,) = with_gradients(modules[i], torch.ones(1))
        assert (value.item(), gradient.item()) == ((2, 3, 5)[i] + 1, (2, 3, 5)[i])


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("returned", [lambda x: tf.cast(x, tf.float64), lambda x: [x, x], lambda x: x[None]])
def test_results_of_another_kind_than_promised(backend, returned):
    options = {"late": False}
    f = polybridge.wrap(lambda x: returned(x) if options["late"] else x, src="tf", dst="torch")
    compiled = graph(lambda x: f(x) + 1, backend=backend)
    compiled(torch.ones(3))
    options["late"] = True
    with pytest.raises(polybridge.PromisedShapeError, match=r"float\d\d/\d .*but float32/1 was promised"):
        compiled(torch.ones(3))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.filterwarnings("ignore::polybridge.PrecisionWarning")
def test_the_precision_of_jax_when_the_graph_is_traced(backend):
    f, x = polybridge.wrap(lambda x: x * 2, src="jax", dst="torch"), values(3)
    for x64, dtype in [(False, torch.float32), (True, torch.float64)]:
        torch._dynamo.reset()
        with jax.enable_x64(x64):
            torch.testing.assert_close(graph(lambda x: f(x) + 1, backend=backend)(x), (x * 2 + 1).to(dtype))


def test_a_size_that_depends_on_values():
    f = polybridge.wrap(
        lambda x: tf.boolean_mask(x, x > 0),
        src="tf",
        dst="torch",
        output_specs=polybridge.TensorSpec((None,), "float64"),
    )
    compiled = graph(lambda x: f(x).exp().sum())
    for seed in range(3):
        x = values(20, seed=seed)
        torch.testing.assert_close(compiled(x), x[x > 0].exp().sum())


# Counts.


def test_the_compiler_is_not_imported_before_it_is_used():
    code = """
import sys, torch, polybridge
f = polybridge.wrap(lambda x: x, src="numpy", dst="torch", vjp="finite-difference")
f(torch.ones(3, requires_grad=True)).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr


def test_one_compilation_per_signature():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = graph(wrapped(TENSORFLOW, fn), backend=counter)
    for _ in range(3):
        compiled(values(3).requires_grad_()).sum().backward()
    compiled(values(3).float())
    assert counter.frame_count == 2


def test_the_function_runs_once_per_step():
    runs = []

    def counted(m, x):
        runs.append(1)
        return m.sin(x)

    compiled = graph(wrapped(TENSORFLOW, counted), backend="inductor")
    for _ in range(3):
        runs.clear()
        compiled(values(3).requires_grad_()).sum().backward()
    assert len(runs) == 1


def test_the_mask_of_the_forward_is_that_of_the_backward():
    f = polybridge.wrap(lambda x: tf.nn.dropout(x, 0.5), src="tf", dst="torch")
    y, (g,) = with_gradients(graph(f), torch.ones(1000))
    torch.testing.assert_close(y, g)
    assert y.unique().tolist() == [0, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_of_a_random_function_are_two(backend):
    f = polybridge.wrap(lambda x: tf.nn.dropout(x, 0.5), src="tf", dst="torch")
    a, b = graph(lambda x: (f(x), f(x)), backend=backend)(torch.ones(1000))
    assert not torch.equal(a, b)


def test_steps_leave_no_residual():
    compiled, before = graph(wrapped(TENSORFLOW, fn)), set(residuals._residuals)
    for _ in range(20):
        compiled(values(3).requires_grad_()).sum().backward()
        compiled(values(3).requires_grad_())
    gc.collect()
    assert set(residuals._residuals) <= before


# Memory. The function is trusted with the caller's own after its first calls, hence the loops.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("src", ["tf", "jax"])
def test_an_input_that_is_written_to_before_the_backward(src, backend):
    f = polybridge.wrap(lambda x, w: x * w, src=src, dst="torch")
    compiled = graph(lambda x, w: f(x, w).sum(), backend=backend)
    for _ in range(4):
        x, w = torch.arange(8.0), torch.ones(8, requires_grad=True)
        y = compiled(x, w)
        x.zero_()
        try:
            y.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert w.grad.tolist() == list(range(8))


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_is_lent_and_watched(trained):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8), requires_grad=trained)

        def forward(self, x):
            return f(x, self.w)

    f, net = polybridge.wrap(lambda x, w: x * w, src="jax", dst="torch"), Net()
    compiled = graph(net)
    for _ in range(3):
        y = compiled(torch.arange(8.0, requires_grad=True)).sum()
    with polybridge.observe.count_crossings() as counted:
        y = compiled(torch.arange(8.0, requires_grad=True)).sum()
    assert counted.copies == 1  # of x
    with torch.no_grad():
        net.w.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("src", ["tf", "jax"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_compiler_reuses_no_memory_of_a_residual(src, trained):
    f = polybridge.wrap(lambda x, w: x * w, src=src, dst="torch")

    def net(x, w):
        y = f(x * 2 + 1, w)  # the memory of what is computed here is free after its last reader in the graph
        z = torch.cos(x) * 3 + y.detach()
        return y.sum(), f(z.cos(), z)

    compiled = graph(net, backend="inductor")
    for _ in range(4):
        x, w = values(8).requires_grad_(trained), values(8, seed=1).requires_grad_()
        compiled(x, w)[0].backward()
        torch.testing.assert_close(w.grad, x.detach() * 2 + 1)


# Limits.


def test_an_exception_of_the_function():
    def fails(m, x):
        if tf.reduce_any(x < 0):
            raise KeyError("mine")
        return x

    compiled = graph(wrapped(TENSORFLOW, fails))
    compiled(torch.ones(3))
    with pytest.raises(KeyError, match="mine"):
        compiled(-torch.ones(3))


def test_an_exception_while_tracing_is_kept():
    def fails(m, x):
        raise KeyError("mine")

    with pytest.raises(torch._dynamo.exc.Unsupported):
        graph(wrapped(TENSORFLOW, fails))(values(3))
    assert isinstance(polybridge.last_error(), KeyError)


def test_a_gradient_of_an_input_that_is_not_contiguous():
    f = wrapped(TENSORFLOW, lambda m, x: (m.sin(x), m.count(x)))
    x = values(3, 4).T.requires_grad_()
    (g,) = torch.autograd.grad(graph(lambda x: f(x)[0].sum() + x.sum(), backend="inductor")(x), x)
    torch.testing.assert_close(g, x.cos() + 1)


def test_a_second_derivative_is_torchs_own_error():
    x = values(3).requires_grad_()
    (g,) = torch.autograd.grad(graph(wrapped(TENSORFLOW, fn))(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        g.sum().backward()


def test_an_object_as_argument_breaks_the_graph():
    class Options:
        scale = 3.0

    f = polybridge.wrap(lambda x, options: x * options.scale, src="tf", dst="torch")
    options, x = Options(), values(3)
    compiled = graph(lambda x: f(x.sin(), options).cos(), fullgraph=False)
    torch.testing.assert_close(with_gradients(compiled, x), with_gradients(lambda x: (x.sin() * 3).cos(), x))
    assert sum(counters["graph_break"].values()) >= 1


def test_shared_memory_is_copied_out_of_a_graph():
    f = polybridge.wrap(lambda x: x, src="tf", dst="torch", copy=False)
    x = values(100)
    assert graph(f)(x).data_ptr() != x.data_ptr()


def test_torch_inside_of_tensorflow_inside_of_a_graph():
    inner = polybridge.wrap(lambda x: x.sin() * x, src="torch", dst="tf")
    f = polybridge.wrap(lambda x: inner(x * 2.0), src="tf", dst="torch")
    found = with_gradients(graph(f), values(3))
    torch.testing.assert_close(found, with_gradients(lambda x: (2 * x).sin() * 2 * x, values(3)))


@pytest.mark.parametrize("middle", ["tf", "jax"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "inner",
    [
        lambda z: (z.conj() * z).real + z.conj().imag * 2,
        lambda z: torch.func.vmap(torch.func.grad(lambda z: (z * z.conj()).real))(z).real,
        lambda z: torch.func.jvp(torch.sin, (z,), (z,))[1].imag,
    ],
    ids=["lazy conjugation", "transforms", "forward mode"],
)
def test_all_of_torch_works_inside_of_another_framework_inside_of_a_graph(inner, middle, grad):
    lent = polybridge.wrap(inner, src="torch", dst=middle)
    f = polybridge.wrap(lambda z: lent(z) * 2, src=middle, dst="torch")
    z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=grad)
    found, expected = graph(f)(z), inner(z) * 2
    torch.testing.assert_close(found, expected)
    if grad:
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), z) for y in (found, expected)))


@pytest.mark.parametrize("middle", ["tf", "jax"])
@pytest.mark.parametrize("grad", [False, True])
def test_torch_inside_of_another_framework_inside_of_a_graph_sees_autocast(middle, grad):
    lent = polybridge.wrap(lambda x: x @ x, src="torch", dst=middle)
    f = polybridge.wrap(lambda x: lent(x), src=middle, dst="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert graph(f)(torch.ones(2, 2, requires_grad=grad)).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore::polybridge.LoopWarning")
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev", "hessian", "vmap of grad", "vmap of hessian"])
def test_transforms_in_a_graph(transform):
    f, x = wrapped(TENSORFLOW, fn), values(3)
    found = graph(lambda x: COMPOSITIONS[transform](f)(x))(x)
    torch.testing.assert_close(found, COMPOSITIONS[transform](native(fn))(x))


def test_a_checkpoint_in_a_graph():
    f, g = wrapped(TENSORFLOW, fn), native(fn)
    found = with_gradients(graph(lambda x: checkpoint(lambda x: f(x.cos()), x, use_reentrant=False)), values(3))
    torch.testing.assert_close(found, with_gradients(lambda x: g(x.cos()), values(3)))


def test_a_checkpoint_around_a_graph():
    f, g = wrapped(TENSORFLOW, fn), native(fn)
    compiled = graph(lambda x: f(x.cos()))
    found = with_gradients(lambda x: checkpoint(compiled, x, use_reentrant=False), values(3))
    torch.testing.assert_close(found, with_gradients(lambda x: g(x.cos()), values(3)))


def test_hooks_that_copy_around_a_graph_are_refused():
    compiled = graph(wrapped(TENSORFLOW, fn))
    with saved_tensors_hooks(torch.clone, lambda x: x), pytest.raises(polybridge.ResidualError, match="hook"):
        compiled(values(3).requires_grad_()).sum().backward()


def test_threads():
    compiled, found = graph(wrapped(TENSORFLOW, fn)), []
    threads = [threading.Thread(target=lambda: found.append(with_gradients(compiled, values(3)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [with_gradients(native(fn), values(3))] * 4)


def test_a_graph_can_go_backward_twice():
    x = values(3).requires_grad_()
    y = graph(wrapped(TENSORFLOW, fn), backend="inductor")(x).sum()
    torch.testing.assert_close(*(torch.autograd.grad(y, x, retain_graph=True) for _ in range(2)))


def test_tracing_does_not_touch_variables():
    norm = keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
    norm.build((None, 2))
    x = values(4, 2).float()
    graph(polybridge.wrap(lambda x: norm(x, training=True), src="tf", dst="torch"))(x)
    torch.testing.assert_close(torch.tensor(norm.moving_mean.numpy()), 0.5 * x.mean(0))


# Other tracers.


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    traced = make_fx(wrapped(TENSORFLOW, fn), tracing_mode=mode)(values(3))
    torch.testing.assert_close(traced(values(3, seed=1)), native(fn)(values(3, seed=1)))


@pytest.mark.parametrize("function", ["elementwise", "mixing"])
def test_linearize(source, function):
    x, found = values(3), []
    for f in (wrapped(source, FUNCTIONS[function]), native(FUNCTIONS[function])):
        y, push = torch.func.linearize(f, x)
        found.append((y, push(x.cos()), push(x.sin())))
    torch.testing.assert_close(*found)


@dataclasses.dataclass
class Result:
    value: object


MARKER = object()
OPAQUE = {
    "dataclass": (lambda x: Result(x * 2), lambda found: found.value),
    "in_a_tuple": (lambda x: (1, Result(x * 2)), lambda found: found[1].value),
    "object": (lambda x: (x * 2, MARKER), lambda found: found[0] if found[1] is MARKER else None),
    "dtype": (lambda x: {"y": x * 2, "d": tf.float32}, lambda found: found["y"] if found["d"] is tf.float32 else None),
    "with_none": (lambda x, y=None: Result(x * 2 if y is None else y), lambda found: found.value),
}


@pytest.mark.parametrize(("make", "take"), OPAQUE.values(), ids=OPAQUE)
@pytest.mark.parametrize("taken", ["outside", "inside"])
def test_a_result_that_no_graph_holds_is_whole_after_the_break(make, take, taken):
    """The compiler's own mark for a value that is no tensor must not come out."""
    f = polybridge.wrap(make, src="tf", dst="torch")
    call = (lambda x: f(x, None)) if make.__defaults__ else f
    inside = torch.compile(lambda x: take(call(x * 1)) + 0, backend="aot_eager")
    whole = torch.compile(lambda x: call(x * 1), backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        y = inside(x) if taken == "inside" else take(whole(x))
        assert y.tolist() == [2.0] * 3
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("make", [make for make, _ in OPAQUE.values()], ids=OPAQUE)
def test_the_compiler_looks_into_no_frame_of_polybridge_after_a_break(make, monkeypatch):
    """It warned of caches there."""
    warned = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda message, *_, **__: warned.append(message))
    f = polybridge.wrap(make, src="tf", dst="torch")
    torch.compile(lambda x: (print(end=""), f(x * 1), f(x + 1)), backend="aot_eager")(torch.ones(3))
    assert warned == []


def test_an_error_of_the_function_is_in_the_compilers_message():
    mistakes = [NameError("first"), KeyError("second")]

    def fails(x):
        if mistakes:
            raise mistakes.pop(0)
        return x * 2

    f = polybridge.wrap(fails, src="numpy", dst="torch")
    for message in ("fails, which raised NameError: first", "fails, which raised KeyError: 'second'"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            graph(lambda x: f(x) + 1)(values(3))
        torch._dynamo.reset()
    torch.testing.assert_close(graph(lambda x: f(x) + 1)(values(3)), values(3) * 2 + 1)


def test_an_error_of_the_function_is_its_own_after_the_break():
    def fails(x):
        return x * undefined  # noqa: F821

    f = polybridge.wrap(fails, src="numpy", dst="torch")
    with pytest.raises(NameError, match="'undefined' is not defined"):
        graph(lambda x: f(x) + 1, fullgraph=False)(values(3))
