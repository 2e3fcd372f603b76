"""torch.export: the call is one operation of the graph, which runs in the process that exported it."""

import io
import subprocess
import sys

import pytest
import torch

import polybridge
from tests.torch_dst.sources import TENSORFLOW, native, values, wrapped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(torch.nn.Module):
    """A layer and a foreign function."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.activation = torch.nn.Linear(3, 4, dtype=torch.float64), activation

    def forward(self, x):
        return self.activation(self.inner(x)).sum(-1)


def fn(m, x):
    return m.sin(x) * x


@pytest.fixture
def exported(source):
    return torch.export.export(Net(wrapped(source, fn)), (values(2, 3),))


@pytest.mark.xfail(raises=TypeError, reason="torch 2.13 cannot export what `nonstrict_trace` marks with strict=True")
def test_the_strict_exporter():
    torch.export.export(Net(wrapped(TENSORFLOW, fn)), (values(2, 3),), strict=True)


def test_the_call_is_one_operation(exported):
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets.count("polybridge.call.default") == 1


def test_the_graph_runs(exported):
    x = values(2, 3, seed=1)
    torch.testing.assert_close(exported.module()(x), Net(native(fn))(x))


def test_the_graph_can_be_trained(exported):
    module, expected, x = exported.module(), Net(native(fn)), values(2, 3, seed=1)
    module(x).sum().backward()
    expected(x).sum().backward()
    torch.testing.assert_close(module.inner.weight.grad, expected.inner.weight.grad)


def test_a_second_derivative_of_the_graph(exported):
    x, found = values(2, 3, seed=1).requires_grad_(), []
    for f in (exported.module(), Net(native(fn))):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.pow(2).sum(), x)[0])
    torch.testing.assert_close(*found)


def test_a_dynamic_dimension():
    batch = torch.export.Dim("batch", min=2, max=100)
    program = torch.export.export(Net(wrapped(TENSORFLOW, fn)), (values(5, 3),), dynamic_shapes=({0: batch},))
    x = values(9, 3)
    torch.testing.assert_close(program.module()(x), Net(native(fn))(x))


def test_the_graph_can_be_lowered():
    program = torch.export.export(Net(wrapped(TENSORFLOW, fn)), (values(2, 3),)).run_decompositions()
    torch.testing.assert_close(program.module()(values(2, 3)), Net(native(fn))(values(2, 3)))


def test_an_exported_module_can_be_compiled():
    program = torch.export.export(Net(wrapped(TENSORFLOW, fn)), (values(2, 3),))
    compiled = torch.compile(program.module(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values(2, 3)), Net(native(fn))(values(2, 3)))


def _saved():
    file = io.BytesIO()
    torch.export.save(torch.export.export(Net(wrapped(TENSORFLOW, fn)), (values(2, 3),)), file)
    return file.getvalue()


def test_a_saved_graph_runs_in_the_same_process():
    module = torch.export.load(io.BytesIO(_saved())).module()
    torch.testing.assert_close(module(values(2, 3)), Net(native(fn))(values(2, 3)))


ELSEWHERE = """
import io, sys, torch
import polybridge
polybridge.get_backend("torch")
module = torch.export.load(io.BytesIO(sys.stdin.buffer.read())).module()
try:
    module(torch.ones(2, 3, dtype=torch.float64))
except polybridge.CompilationError as error:
    print(error)
"""


def test_a_saved_graph_says_in_another_process_that_its_function_is_missing():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=_saved(), capture_output=True, timeout=120)
    assert b"belongs to the process that compiled or exported it" in done.stdout, done.stderr.decode()


def test_a_graph_without_polybridge_is_torchs_own_error():
    code = "import io, sys, torch; torch.export.load(io.BytesIO(sys.stdin.buffer.read()))"
    done = subprocess.run([sys.executable, "-c", code], input=_saved(), capture_output=True, timeout=120)
    assert done.returncode and b"polybridge" in done.stderr


@pytest.mark.parametrize("test", ["test_schema", "test_faketensor", "test_aot_dispatch_static"])
def test_torchs_own_checks_of_an_operation(test):
    from polybridge.backends.torch import compiled

    f = wrapped(TENSORFLOW, fn)
    torch.compile(f, backend="eager", fullgraph=True)(values(3))
    name = list(compiled._entries)[-1]
    found = torch.library.opcheck(
        torch.ops.polybridge.call.default, (name, [values(3).requires_grad_()], "float64/1", [3], 0), test_utils=test
    )
    assert found == {test: "SUCCESS"}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("grad", [True, False])
def test_torchscript_refuses_the_call_instead_of_keeping_its_result(source, grad):
    f = wrapped(source, lambda m, x: m.sin(x))
    with pytest.raises(polybridge.CompilationError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: f(x) + x, values(3).requires_grad_(grad))
