"""Asks that a TensorFlow 1 session's graph is a differentiable function of torch, and that TfPyTh's names work."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.compat import tfpyth
from polybridge.tf1 import graph_function

v1 = tf.compat.v1


@pytest.fixture
def session():
    """Return an open session of a fresh default graph."""
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def to_torch(session, inputs, outputs):
    """Return a part of the session's graph as a torch function."""
    return polybridge.wrap(graph_function(session, inputs=inputs, outputs=outputs), src="tf", dst="torch")


def leaf(value, dtype=torch.float32):
    """Return a torch leaf that requires a gradient."""
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def test_value_and_gradients(session):
    a, b = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    f = to_torch(session, [a, b], 3 * a + 4 * b * b)
    x, y = leaf(1.0), leaf(3.0)
    f(x, y).backward()
    assert (f(x, y).item(), x.grad.item(), y.grad.item()) == (39, 3, 24)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_higher_orders(session, order):
    x = v1.placeholder(tf.float64, [2])
    f = to_torch(session, [x], x**4)
    t = leaf([2.0, 3.0], torch.float64)
    y = f(t)
    for _ in range(order):
        (y,) = torch.autograd.grad(y.sum(), t, create_graph=True)
    expected = [4 * t**3, 12 * t**2, 24 * t][order - 1]
    torch.testing.assert_close(y, expected)


def test_gradcheck_and_gradgradcheck(session):
    a, b = v1.placeholder(tf.float64, [3]), v1.placeholder(tf.float64, [3])
    f = to_torch(session, [a, b], tf.sin(a) * b**2)
    inputs = leaf([0.1, 0.5, 0.9], torch.float64), leaf([1.0, 2.0, 3.0], torch.float64)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_several_outputs(session):
    x = v1.placeholder(tf.float32, [3])
    f = to_torch(session, [x], [x * 2, tf.argmax(x), tf.reduce_sum(x**2)])
    t = leaf([1.0, 5.0, 2.0])
    double, position, total = f(t)
    assert double.tolist() == [2, 10, 4] and position.item() == 1
    assert not position.requires_grad
    (double.sum() + total).backward()
    assert t.grad.tolist() == [4, 12, 6]


def test_the_gradient_of_one_output_ignores_the_others(session):
    a, b = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    f = to_torch(session, [a, b], (a * 2, b * 3))
    x, y = leaf(1.0), leaf(1.0)
    first, _ = f(x, y)
    assert torch.autograd.grad(first, [x, y], allow_unused=True)[0].item() == 2


def test_nested_inputs_and_outputs(session):
    w, x = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.float32, [2])
    f = to_torch(session, [{"w": w, "x": [x]}], {"y": [w * x], "sum": tf.reduce_sum(x)})
    a, b = leaf([2.0, 3.0]), leaf([5.0, 7.0])
    out = f({"w": a, "x": [b]})
    assert out["y"][0].tolist() == [10, 21] and out["sum"].item() == 12
    out["y"][0].sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([5, 7], [2, 3])


def test_one_tree_is_one_argument(session):
    w, x = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    f = to_torch(session, {"w": w, "x": x}, w * x)
    assert f({"w": torch.tensor(2.0), "x": torch.tensor(3.0)}).item() == 6


def test_an_unused_input_gets_none_as_in_torch(session):
    a, b = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
    f = to_torch(session, [a, b], a * 2)
    x, y = leaf(1.0), leaf(1.0)
    f(x, y).backward()
    assert x.grad.item() == 2 and y.grad is None


def test_an_integer_input(session):
    w, i = v1.placeholder(tf.float32, [3]), v1.placeholder(tf.int64, [None])
    f = to_torch(session, [w, i], tf.gather(w, i))
    t = leaf([1.0, 2.0, 3.0])
    f(t, torch.tensor([0, 0, 2])).sum().backward()
    assert t.grad.tolist() == [2, 0, 1]


def test_every_batch_size(session):
    x = v1.placeholder(tf.float32, [None, 2])
    f = to_torch(session, [x], tf.reduce_mean(x**2, 0))
    for n in (1, 3, 8):
        t = torch.ones(n, 2, requires_grad=True)
        f(t).sum().backward()
        torch.testing.assert_close(t.grad, torch.full((n, 2), 2 / n))


@pytest.mark.parametrize("order", [1, 2])
def test_the_dropout_mask_is_drawn_once(session, order):
    """y = mask * x**2, whose derivatives carry the same mask."""
    x = v1.placeholder(tf.float32, [1000])
    f = to_torch(session, [x], tf.nn.dropout(x, 0.5) * x)
    t = torch.ones(1000, requires_grad=True)
    y = value = f(t)
    for _ in range(order):
        (y,) = torch.autograd.grad(y.sum(), t, create_graph=True)
    assert torch.equal(y, 2 * value)
    assert 300 < int((value != 0).sum()) < 700


def test_the_mask_is_drawn_anew_at_every_call(session):
    x = v1.placeholder(tf.float32, [1000])
    f = to_torch(session, [x], tf.nn.dropout(x, 0.5))
    t = torch.ones(1000, requires_grad=True)
    assert not torch.equal(f(t), f(t))


def test_the_forward_runs_once(session):
    x = v1.placeholder(tf.float32, [])
    counter = v1.get_variable("counter", initializer=0.0, use_resource=True, trainable=False)
    with tf.control_dependencies([counter.assign_add(1.0)]):
        y = x**2
    f = to_torch(session, [x], y)
    session.run(v1.global_variables_initializer())
    (g,) = torch.autograd.grad(f(t := leaf(3.0)), t, create_graph=True)
    torch.autograd.grad(g, t)
    assert session.run(counter) == 1


@pytest.mark.parametrize("resource", [True, False])
def test_a_trainable_variable_is_warned_of_once(session, resource):
    x = v1.placeholder(tf.float32, [2])
    with v1.variable_scope("net", use_resource=resource):
        w = v1.get_variable("weights", initializer=tf.constant([3.0, 4.0]))
    f = to_torch(session, [x], x * w)
    session.run(v1.global_variables_initializer())
    t = leaf([1.0, 1.0])
    with pytest.warns(polybridge.DetachedStateWarning, match="net/weights") as caught:
        f(t).sum().backward()
        f(t)
    assert t.grad.tolist() == [3, 4] and len(caught) == 1


def test_a_variable_that_was_assigned_is_read_anew(session):
    x = v1.placeholder(tf.float32, [])
    w = v1.get_variable("w", initializer=3.0, use_resource=True, trainable=False)
    f = to_torch(session, [x], x * w)
    session.run(v1.global_variables_initializer())
    before = f(leaf(1.0)).item()
    session.run(w.assign(5.0))
    assert (before, f(leaf(1.0)).item()) == (3, 5)


def test_the_derivative_uses_the_variable_of_its_forward(session):
    x = v1.placeholder(tf.float32, [])
    w = v1.get_variable("w", initializer=3.0, use_resource=True, trainable=False)
    f = to_torch(session, [x], x * w)
    session.run(v1.global_variables_initializer())
    y = f(t := leaf(1.0))
    session.run(w.assign(5.0))
    y.backward()
    assert t.grad.item() == 3


def test_a_random_operation_inside_a_loop_cannot_be_differentiated(session):
    x = v1.placeholder(tf.float32, [2])
    y = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * tf.random.uniform([2])), [0, x])[1]
    f = to_torch(session, [x], y)
    with pytest.raises(polybridge.NotDifferentiableError, match="graph_function"):
        f(leaf([1.0, 1.0])).sum().backward()


def test_a_tensor_of_another_graph_is_refused(session):
    with tf.Graph().as_default():
        foreign = v1.placeholder(tf.float32, [])
    with pytest.raises(polybridge.ArgumentError, match="tensors of the session's graph"):
        graph_function(session, inputs=[foreign], outputs=foreign * 2)


@pytest.mark.parametrize("wrong", [None, 3.0, "x:0", np.ones(2)], ids=["none", "float", "name", "array"])
def test_what_is_no_graph_tensor_is_refused(session, wrong):
    x = v1.placeholder(tf.float32, [])
    with pytest.raises(polybridge.ArgumentError, match="tensors of the session's graph"):
        graph_function(session, inputs=[x], outputs=[x, wrong])


@pytest.mark.parametrize("arguments", [(), (1.0, 2.0)], ids=["none", "two"])
def test_a_wrong_number_of_arguments_is_refused(session, arguments):
    x = v1.placeholder(tf.float32, [])
    f = to_torch(session, [x], x * 2)
    with pytest.raises(polybridge.ArgumentError, match="graph_function"):
        f(*map(torch.tensor, arguments))


def test_a_wrong_shape_is_refused_by_name(session):
    x = v1.placeholder(tf.float32, [2], name="features")
    with pytest.raises(Exception, match=r"features|\(2,\)|shape"):
        to_torch(session, [x], x * 2)(torch.ones(3))


def test_a_wrong_dtype_is_refused(session):
    x = v1.placeholder(tf.float32, [2])
    with pytest.raises(Exception, match="float64"):
        to_torch(session, [x], x * 2)(torch.ones(2, dtype=torch.float64))


def test_a_finalized_graph_still_gives_values_or_says_why(session):
    x = v1.placeholder(tf.float32, [])
    y = x * 2
    session.graph.finalize()
    try:
        f = to_torch(session, [x], y)
    except polybridge.ArgumentError as error:
        assert "finalized" in str(error)
    else:
        assert f(torch.tensor(2.0)).item() == 4


def test_a_graph_that_is_finalized_afterwards_is_differentiated(session):
    x = v1.placeholder(tf.float32, [])
    f = to_torch(session, [x], x**2)
    session.graph.finalize()
    f(t := leaf(3.0)).backward()
    assert t.grad.item() == 6


def test_a_closed_session_is_an_error_that_says_so():
    with tf.Graph().as_default():
        session = v1.Session()
        x = v1.placeholder(tf.float32, [])
        f = to_torch(session, [x], x * 2)
        session.close()
    with pytest.raises(RuntimeError, match=r"(?i)closed"):
        f(torch.tensor(1.0))


def test_bfloat16_and_complex_cross(session):
    x = v1.placeholder(tf.bfloat16, [2])
    z = v1.placeholder(tf.complex64, [1])
    f = to_torch(session, [x, z], (x * 2, z * z))
    a, b = f(torch.ones(2, dtype=torch.bfloat16), torch.tensor([1 + 2j]))
    assert a.dtype == torch.bfloat16 and a.tolist() == [2, 2]
    assert b.tolist() == [-3 + 4j]


def test_a_string_output_is_refused(session):
    x = v1.placeholder(tf.float32, [])
    with pytest.raises(polybridge.PolybridgeError, match="string"):
        to_torch(session, [x], v1.as_string(x))(torch.tensor(1.0))


# TfPyTh's three scenarios, on its own numbers: 3a + 4b**2 at a=1, b=3 is 39, with gradients 3 and 24.


def test_tfpyth_torch_from_tensorflow(session):
    a, b = v1.placeholder(tf.float32, name="a"), v1.placeholder(tf.float32, name="b")
    f = tfpyth.torch_from_tensorflow(session, [a, b], 3 * a + 4 * b * b, tf.float32).apply
    x, y = leaf(1.0), leaf(3.0)
    f(x, y).backward()
    assert (f(x, y).item(), x.grad.item(), y.grad.item()) == (39, 3, 24)


def test_tfpyth_eager_tensorflow_from_torch():
    f = tfpyth.eager_tensorflow_from_torch(lambda a, b: 3 * a + 4 * b * b)
    x, y = tf.constant(1.0), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = f(x, y)
    assert [float(v) for v in (z, *tape.gradient(z, [x, y]))] == [39, 3, 24]


def test_tfpyth_tensorflow_from_torch(session):
    a, b = v1.placeholder(tf.float32, [], name="a"), v1.placeholder(tf.float32, [], name="b")
    z = tfpyth.tensorflow_from_torch(lambda a, b: 3 * a + 4 * b * b, [a, b], tf.float32, name="z")
    assert session.run([z, *tf.gradients(z, [a, b])], {a: 1, b: 3}) == [39, 3, 24]
    assert z.op.name == "z"


def test_tfpyth_with_placeholders_of_unknown_shape(session):
    a, b = v1.placeholder(tf.float32), v1.placeholder(tf.float32)
    z = tfpyth.tensorflow_from_torch(lambda a, b: 3 * a + 4 * b * b, [a, b], tf.float32)
    assert session.run([z, *tf.gradients(z, [a, b])], {a: 1, b: 3}) == [39, 3, 24]


def test_tfpyth_with_several_results(session):
    a = v1.placeholder(tf.float32, [2])
    x, y = tfpyth.tensorflow_from_torch(lambda a: (a * 2, a.argmax()), [a], [tf.float32, tf.int64])
    np.testing.assert_array_equal(session.run(x, {a: [1, 2]}), [2, 4])
    assert session.run(y, {a: [1, 2]}) == 1


def test_tfpyth_checks_the_dtype(session):
    a = v1.placeholder(tf.float32, [])
    with pytest.raises(ValueError, match="tf_dtype"):
        tfpyth.torch_from_tensorflow(session, [a], a * 2, tf.float64)
    with pytest.raises(TypeError, match="Tout"):
        tfpyth.tensorflow_from_torch(lambda a: a * 2, [a], tf.float64)


# In the graphs of other frameworks.


def compiled_by_torch(f, x):
    """Return value and gradient of the sum, compiled as one graph."""
    compiled, x = torch.compile(f, fullgraph=True, backend="aot_eager"), torch.tensor(x, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    return y.detach().numpy(), x.grad.numpy()


def compiled_by_jax(f, x):
    """Return value and gradient of the sum, compiled as one graph."""
    import jax

    jax.config.update("jax_enable_x64", True)
    return jax.jit(f)(x), jax.jit(jax.grad(lambda x: f(x).sum()))(x)


def doubled_thrice(x):
    """Return x * 8, by a loop."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), [0, x])[1]


COMPILERS = {"torch": compiled_by_torch, "jax": compiled_by_jax}
GRAPHS = {
    "of a variable": (lambda x, v: tf.sin(x) * v, lambda x: (3 * np.sin(x), 3 * np.cos(x))),
    "of a loop": (lambda x, v: doubled_thrice(x), lambda x: (8 * x, np.full_like(x, 8))),
    "of a sum": (lambda x, v: tf.reduce_sum(x**2), lambda x: ((x**2).sum(), 2 * x)),
    "that returns its input": (lambda x, v: x, lambda x: (x, np.ones_like(x))),
}


@pytest.mark.filterwarnings("ignore::polybridge.DetachedStateWarning")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_another_frameworks_compiler_finds_shapes_and_gradients(session, compiler, graph):
    build, expected = GRAPHS[graph]
    x = v1.placeholder(tf.float64, [3] if graph == "of a loop" else [None])  # a loop does not refine shapes
    variable = v1.get_variable("v", initializer=np.float64(3))
    f = polybridge.wrap(graph_function(session, [x], build(x, variable)), src="tf", dst=compiler)
    session.run(v1.global_variables_initializer())
    at = np.array([0.5, 1.0, 2.0])
    for found, known in zip(COMPILERS[compiler](f, at), expected(at), strict=True):
        np.testing.assert_allclose(found, known, rtol=1e-12)


def test_an_input_without_influence_has_none_in_a_compiled_graph(session):
    a, b = v1.placeholder(tf.float32, [2]), v1.placeholder(tf.float32, [2])
    f = torch.compile(to_torch(session, [a, b], tf.sin(a)), fullgraph=True, backend="aot_eager")
    x, unused = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    f(x, unused).sum().backward()
    assert x.grad is not None and unused.grad is None
