"""Asks that tracing a torch function into a graph leaves what the function reaches as it was."""

import jax
import jax.numpy as jnp
import keras
import pytest
import tensorflow as tf
import torch

import polybridge
from tests.semantics.calls import to_tf, with_gradient

X = tf.constant([1.0, 2.0, 3.0])


class Counting(torch.nn.Module):
    """Counts in a buffer, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        """Return `x * count`."""
        self.count += 1
        return x * self.count


def write_to_tensor(state, x):
    state.add_(x)
    return state * x


def write_to_view(state, x):
    state[:2].mul_(x[:2])
    return state * x


def write_by_index(state, x):
    state[1] = x[1]
    return state * x


def write_to_list(state, x):
    states = [state]
    torch._foreach_add_(states, [x])
    return torch.stack(states).sum() * x


def write_by_out(state, x):
    return torch.mul(x.detach(), 2, out=state) * x


def require_a_gradient(state, x):
    state.requires_grad_()
    return state * x


def rebind_the_data(state, x):
    state.data = torch.ones(3)
    return state * x


WRITES = [
    write_to_tensor,
    write_to_view,
    write_by_index,
    write_to_list,
    write_by_out,
    require_a_gradient,
    rebind_the_data,
]


def trace(fn):
    """Trace the gradient of a torch function, without running the graph."""
    wrapped = to_tf(fn)
    tf.function(lambda x: with_gradient(wrapped, x)).get_concrete_function(tf.TensorSpec([3]))


def look(tensor):
    """Return all that a write could change."""
    return tensor.tolist(), tensor._version, tensor.requires_grad, tensor.grad_fn, tensor.data_ptr(), type(tensor)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_tracing_leaves_a_tensor_as_it_was(write):
    state = torch.zeros(3)
    before = look(state)
    trace(lambda x: write(state, x))
    assert look(state) == before


def test_tracing_leaves_the_base_of_a_view_as_it_was():
    base = torch.zeros(6)
    state = base[:3]
    before = look(base), look(state)
    trace(lambda x: write_to_tensor(state, x))
    assert (look(base), look(state)) == before


def test_tracing_leaves_a_buffer_as_it_was():
    module = Counting()
    state = module.count
    before = look(state)
    trace(module)
    assert module.count is state and look(state) == before


def test_tracing_leaves_a_parameter_that_is_trained_inside_as_it_was():
    weight = torch.nn.Parameter(torch.ones(3))
    before = look(weight)

    def fn(x):
        (weight * x.detach()).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        return x * 2

    trace(fn)
    assert look(weight) == before and weight.grad is None


def test_a_write_is_seen_by_what_is_traced_after_it():
    """A derivative that goes through closed-over state is not taken for absent."""
    state = torch.zeros(3)

    def fn(x):
        state.zero_()
        state.add_(x)
        return state.clone()

    f = to_tf(fn)
    assert tf.function(lambda x: with_gradient(f, x)[1])(X).numpy().tolist() == [1, 1, 1]


def test_the_written_state_is_that_of_native_torch():
    module, native = Counting(), Counting()
    step = tf.function(lambda x: with_gradient(to_tf(lambda x: module(x)), x))
    for _ in range(3):
        _, g = step(X)
        native(torch.ones(3))
        assert g.numpy().tolist() == module.count.tolist() == native.count.tolist()


def test_values_of_a_closed_over_tensor_can_be_read_while_tracing():
    scales = torch.tensor([2.0, 3.0])
    y, g = tf.function(lambda x: with_gradient(to_tf(lambda x: x * scales.tolist()[1]), x))(X)
    assert y.numpy().tolist() == [3, 6, 9] and g.numpy().tolist() == [3, 3, 3]


def test_a_nested_call_on_a_closed_over_tensor_can_be_traced():
    state = torch.tensor([2.0, 3.0, 4.0])
    square = polybridge.wrap(tf.square, src="tf", dst="torch")
    y, g = tf.function(lambda x: with_gradient(to_tf(lambda x: square(state) * x), x))(X)
    assert y.numpy().tolist() == [4, 18, 48] and g.numpy().tolist() == [4, 9, 16]


CLOSED_OVER = {
    "parameter": lambda: torch.nn.Parameter(torch.tensor([2.0, 3.0, 4.0])),
    "view": lambda: torch.tensor([1.0, 2.0, 3.0, 4.0])[1:],
    "view of a parameter": lambda: torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))[1:],
    "double": lambda: torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64),
}


@pytest.mark.filterwarnings("ignore::polybridge.DetachedStateWarning")
@pytest.mark.parametrize("kind", CLOSED_OVER)
def test_a_nested_call_on_a_closed_over_tensor_of_any_kind_leaves_it_as_it_was(kind):
    state = CLOSED_OVER[kind]()
    before = look(state)
    single = polybridge.wrap(lambda s: tf.cast(tf.square(s), tf.float32), src="tf", dst="torch")
    f = to_tf(lambda x: single(state) * x)
    y, g = tf.function(lambda x: with_gradient(f, x))(X)
    assert y.numpy().tolist() == [4, 18, 48] and g.numpy().tolist() == [4, 9, 16]
    assert look(state) == before


def test_a_nested_call_promises_its_own_dtype():
    """A scalar of another dtype than what it depends on would be promoted by a computation with that."""
    narrow = polybridge.wrap(lambda x: tf.cast(tf.reduce_sum(x), tf.float32), src="tf", dst="torch")
    y, g = tf.function(lambda x: with_gradient(to_tf(narrow), x))(tf.cast(X, tf.float64))
    assert y.dtype == tf.float32 and float(y) == 6
    assert g.dtype == tf.float64 and g.numpy().tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("error")
def test_a_nested_call_of_a_complex_tensor_can_be_traced():
    real = polybridge.wrap(lambda z: tf.reduce_sum(tf.math.real(z * tf.math.conj(z))), src="tf", dst="torch")
    z = tf.constant([1 + 2j, 3 - 1j], tf.complex64)
    y, g = tf.function(lambda z: with_gradient(to_tf(real), z))(z)
    assert float(y) == 15
    assert (
        g.numpy().tolist()
        == with_gradient(lambda z: tf.reduce_sum(tf.math.real(z * tf.math.conj(z))), z)[1].numpy().tolist()
    )


def test_a_nested_call_has_no_gradient_of_what_it_does_not_depend_on():
    first = polybridge.wrap(lambda x, w: x * 2, src="tf", dst="torch")

    @tf.function
    def gradients(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = to_tf(first)(x, w)
        found = tape.gradient(y, [x, w])
        return found[0], tf.zeros(3) if found[1] is None else found[1] + 1

    assert [g.numpy().tolist() for g in gradients(X, X)] == [[2, 2, 2], [0, 0, 0]]


def test_a_nested_call_with_output_specs_can_be_traced():
    double = polybridge.wrap(
        lambda x: x * 2, src="tf", dst="torch", output_specs=polybridge.TensorSpec((3,), "float32")
    )
    y, g = tf.function(lambda x: with_gradient(to_tf(lambda x: double(x) * x), x))(X)
    assert y.numpy().tolist() == [2, 8, 18] and g.numpy().tolist() == [4, 8, 12]


def test_a_nested_call_may_compute_by_torch_itself():
    """What finds the specs of the nested call runs on values, and not on the fake tensors of the trace around it."""
    legacy = polybridge.wrap(lambda a: torch.from_numpy(a).sin().numpy(), src="numpy", dst="torch")
    y = tf.function(to_tf(lambda x: legacy(x.detach()) * x))(X)
    assert y.numpy().tolist() == (torch.tensor([1.0, 2.0, 3.0]).sin() * torch.tensor([1.0, 2.0, 3.0])).tolist()


def test_a_call_on_a_fake_tensor_outside_of_its_mode_gives_fakes_as_torch_does():
    mode = torch._subclasses.FakeTensorMode()
    x = mode.from_tensor(torch.ones(3, requires_grad=True))
    constant = polybridge.wrap(lambda x: (x * 2, tf.range(2)), src="tf", dst="torch")(x)
    for y in (x * 2, *constant):
        assert type(y) is type(x)
    assert constant[0].shape == (3,) and constant[0].requires_grad


def test_a_compiled_function_that_reads_a_closed_over_tensor_can_be_traced():
    state = torch.tensor([2.0, 3.0, 4.0])
    compiled = torch.compile(lambda x: x * state, backend="eager")
    _, g = tf.function(lambda x: with_gradient(to_tf(lambda x: compiled(x) * 2), x))(X)
    assert g.numpy().tolist() == [4, 6, 8]


# State that is bound anew while tracing holds a fake tensor afterwards: nobody can prevent it, and the error says so.


class Averaging(torch.nn.Module):
    """Binds its average anew at every call."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(3)

    def forward(self, x):
        """Return `x` times the average of what came before."""
        self.average = (self.average + x.detach()) / 2
        return x * self.average


def test_a_fake_tensor_that_was_kept_from_a_trace_is_an_error_with_the_way_out():
    f = to_tf(Averaging())
    tf.function(f).get_concrete_function(tf.TensorSpec([3]))
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"Averaging.*result.*traced.*output_specs="):
        f(X)


def test_state_that_is_bound_anew_works_with_output_specs():
    module, native = Averaging(), Averaging()
    f = tf.function(to_tf(lambda x: module(x), output_specs=polybridge.TensorSpec((3,), "float32")))
    for _ in range(2):
        y = f(X)
        expected = native(torch.tensor(X.numpy()))
    assert y.numpy().tolist() == expected.tolist()


def in_a_plan(loop):
    jax.block_until_ready(jax.jit(polybridge.wrap(loop, src="tf", dst="jax"))(jnp.ones(3)))


def in_a_batch(loop):
    with pytest.warns(polybridge.LoopWarning):
        torch.func.vmap(polybridge.wrap(loop, src="tf", dst="torch"))(torch.ones(2, 3))


def in_a_layer(loop):
    class Looping(keras.layers.Layer):
        def call(self, x):
            return loop(x)

    module = polybridge.wrap(Looping(), dst="torch")
    with pytest.warns(polybridge.UntracedWarning):
        for _ in range(3):
            module(torch.ones(3))


@pytest.mark.parametrize("use", [in_a_plan, in_a_batch, in_a_layer])
def test_a_loop_that_cannot_be_traced_leaves_nothing_behind_in_tensorflow(use):
    """`tf.map_fn` sets a caching device while it is traced, which `tf.recompute_grad` does not bear."""

    def loop(x):
        def body(e):
            if not tf.executing_eagerly():
                raise ValueError("not in a graph")
            return e * 2

        return tf.map_fn(body, x)

    tf.compat.v1.reset_default_graph()  # of which others may have left something
    use(loop)
    assert tf.recompute_grad(tf.square)(tf.constant(3.0)).numpy() == 9


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jacfwd": lambda f: lambda x: torch.func.jacfwd(f)(x).sum(0),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
}


@pytest.mark.filterwarnings("ignore::polybridge.LoopWarning")  # inside of a callback TensorFlow does not vectorise
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("inner", ["tf", "jax"])
def test_a_transform_of_a_function_of_a_third_framework_has_its_gradient_in_a_graph(inner, transform):
    lent = polybridge.wrap({"tf": tf.sin, "jax": jnp.sin}[inner], src=inner, dst="torch")
    f = TRANSFORMS[transform](lambda x: lent(x) * x)
    native = TRANSFORMS[transform](lambda x: x.sin() * x)
    bridged = polybridge.wrap(f, src="torch", dst="tf")

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(bridged(x))
        return tape.gradient(y, x)

    (expected,) = torch.func.vjp(native, torch.tensor(X.numpy()))[1](torch.ones(3))
    torch.testing.assert_close(torch.tensor(tf.function(gradient)(X).numpy()), expected)


def test_another_trace_sees_another_autocast_and_default_dtype():
    f = polybridge.wrap(lambda x: (x @ x, torch.zeros(2)), src="torch", dst="tf")
    dtypes = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            dtypes.append(tf.function(f)(tf.ones((2, 2)))[0].dtype)
    assert dtypes == [tf.float32, tf.bfloat16]
    torch.set_default_dtype(torch.float64)
    try:
        assert tf.function(f)(tf.ones((2, 2)))[1].dtype == tf.float64
    finally:
        torch.set_default_dtype(torch.float32)
