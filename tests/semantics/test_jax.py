"""Asks of JAX functions what is particular to them: traces, purity, 64 bits, conventions, ownership."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import polybridge
from polybridge.observe import count_crossings
from tests.semantics.processes import run

jax.config.update("jax_enable_x64", True)


def in_torch(fn, **options):
    return polybridge.wrap(fn, src="jax", dst="torch", **options)


def in_tf(fn, **options):
    return polybridge.wrap(fn, src="jax", dst="tensorflow", **options)


def leaf(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def gradients(fn, *xs):
    return torch.autograd.grad(fn(*xs).sum(), xs, allow_unused=True)


# Traces.


def traced(fn):
    """Return a function and the list to which it adds at each trace."""
    traces = []
    return lambda *xs: traces.append(1) or fn(*xs), traces


def test_a_second_call_of_a_signature_traces_nothing():
    fn, traces = traced(lambda x: x**3)
    wrapped = in_torch(fn)
    gradients(wrapped, leaf([1.0, 2.0]))
    traces.clear()
    gradients(wrapped, leaf([3.0, 4.0]))
    assert traces == []


def test_a_gradient_is_traced_once():
    fn, traces = traced(lambda x: x**3)
    gradients(in_torch(fn), leaf([1.0]))
    assert traces == [1]


def test_another_shape_and_another_dtype_are_traced_again():
    fn, traces = traced(lambda x: x**3)
    wrapped = in_torch(fn)
    for x in (leaf([1.0]), leaf([1.0, 2.0]), leaf([1.0], torch.float32)):
        gradients(wrapped, x)
    assert traces == [1, 1, 1]


def test_a_second_derivative_is_traced_once_a_signature():
    fn, traces = traced(lambda x: x**3)
    wrapped = in_torch(fn)

    def second(x):
        (first,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0].tolist()

    second(leaf([1.0]))
    traces.clear()
    assert (second(leaf([2.0])), traces) == ([12.0], [])


def test_a_call_without_gradients_is_traced_once():
    fn, traces = traced(lambda x: x**3)
    wrapped = in_torch(fn)
    for _ in range(3):
        wrapped(torch.ones(2))
    assert traces == [1]


def test_a_function_with_more_signatures_than_are_kept_stays_right(monkeypatch):
    from polybridge.backends.jax import source

    monkeypatch.setattr(source, "_TRACES", 2)
    wrapped = in_torch(lambda x: (x**2, "text"))
    for _ in range(2):
        for size in range(1, 6):
            x = leaf([3.0] * size)
            y, text = wrapped(x)
            assert torch.autograd.grad(y.sum(), x)[0].tolist() == [6.0] * size and text == "text"


def test_what_a_dropped_function_held_is_freed():
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    wrapped = in_torch(lambda x, held=held: (x * 2, held)[0])
    gradients(wrapped, leaf([1.0]))
    del held, wrapped
    gc.collect()
    assert alive() is None


# Derivatives.


def test_five_orders_of_a_power():
    x = leaf(2.0)
    found, y = [], in_torch(lambda x: x**5)(x)
    for _ in range(5):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(y.item())
    assert found == [80.0, 160.0, 240.0, 240.0, 120.0]


def test_five_orders_of_a_power_in_tensorflow():
    wrapped, x = in_tf(lambda x: x**5), tf.constant(2.0, tf.float64)

    def derivative(fn):
        def derived(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(x)
            return tape.gradient(y, x)

        return derived

    found = []
    for _ in range(5):
        wrapped = derivative(wrapped)
        found.append(float(wrapped(x)))
    assert found == [80.0, 160.0, 240.0, 240.0, 120.0]


UNUSED = {
    "plain": lambda a, b: a * 2,
    "compiled": jax.jit(lambda a, b: a * 2),
    "rematerialised": jax.checkpoint(lambda a, b: jnp.sin(a)),
    "stopped": lambda a, b: a * jax.lax.stop_gradient(b),
    "shape_only": lambda a, b: a * b.shape[0],
    "rounded": lambda a, b: a + jnp.round(b).astype(int),
}


@pytest.mark.parametrize("fn", UNUSED.values(), ids=UNUSED)
def test_an_input_without_influence_has_no_gradient(fn):
    """Case 31."""
    first, second = gradients(in_torch(fn), leaf([1.0]), leaf([1.0]))
    assert first is not None and second is None


def test_an_input_without_influence_on_the_first_derivative_has_no_second():
    x, ct = leaf([1.0]), leaf([1.0])
    (first,) = torch.autograd.grad(in_torch(lambda x: x * 2)(x), x, ct, create_graph=True)
    assert torch.autograd.grad(first.sum(), [x, ct], allow_unused=True)[0] is None


COMPLEX = {
    "holomorphic": (lambda m, z: z * z * z, "complex128"),
    "not_holomorphic": (lambda m, z: z * m["conj"](z) * z, "complex128"),
    "real_through_complex": (lambda m, x: m["real"]((x + 1j * x * x) * (x - 2j)), "float64"),
    "absolute": (lambda m, z: m["abs"](z) * m["real"](z), "complex128"),
}
MODULES = {
    "jax": {"conj": jnp.conj, "real": jnp.real, "abs": jnp.abs},
    "torch": {"conj": torch.conj, "real": torch.real, "abs": torch.abs},
    "tf": {"conj": tf.math.conj, "real": tf.math.real, "abs": tf.abs},
}


def torch_orders(fn, values):
    x = torch.tensor(values, requires_grad=True)
    (first,) = torch.autograd.grad(torch.real(fn(x) * (1 - 2j)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(torch.real(first * (3 + 1j)).sum(), x)
    return first.detach().numpy(), second.numpy()


@pytest.mark.parametrize("fn, dtype", COMPLEX.values(), ids=COMPLEX)
def test_complex_derivatives_of_both_orders_are_torchs_own(fn, dtype):
    """Case 7."""
    values = np.array([1 + 2j, -0.5 + 0.3j]) if dtype == "complex128" else np.array([1.5, -0.7])
    native = torch_orders(lambda x: fn(MODULES["torch"], x), values)
    found = torch_orders(in_torch(lambda x: fn(MODULES["jax"], x)), values)
    np.testing.assert_allclose(found, native, rtol=1e-12)


def tf_orders(fn, values):
    x = tf.constant(values)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.math.real(tf.cast(fn(x), tf.complex128) * (1 - 2j))
        first = tape.gradient(y, x)
        z = tf.math.real(tf.cast(first, tf.complex128) * (3 + 1j))
    return first.numpy(), outer.gradient(z, x).numpy()


@pytest.mark.parametrize("name", ["holomorphic", "not_holomorphic", "absolute"])
def test_complex_derivatives_of_both_orders_are_tensorflows_own(name):
    """Case 7."""
    fn, _ = COMPLEX[name]
    values = np.array([1 + 2j, -0.5 + 0.3j])
    native = tf_orders(lambda x: fn(MODULES["tf"], x), values)
    found = tf_orders(in_tf(lambda x: fn(MODULES["jax"], x)), values)
    np.testing.assert_allclose(found, native, rtol=1e-12)


def test_a_real_input_of_a_complex_function_has_a_real_gradient():
    x = leaf([0.3, -1.2, 0.5])
    native = torch_orders(lambda x: torch.fft.fft(x * x), x.detach().numpy())
    np.testing.assert_allclose(
        torch_orders(in_torch(lambda x: jnp.fft.fft(x * x)), x.detach().numpy()), native, atol=1e-12
    )


# What JAX programs are made of.


def test_a_custom_derivative_is_used():
    fn = jax.custom_vjp(lambda x: x * 2)
    fn.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 100,))
    assert gradients(in_torch(fn), leaf([1.0]))[0].tolist() == [100.0]


def test_a_custom_tangent_is_used():
    @jax.custom_jvp
    def fn(x):
        return x * 2

    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * 100))
    assert gradients(in_torch(fn), leaf([1.0]))[0].tolist() == [100.0]


def test_a_loop_has_its_gradient():
    wrapped = in_torch(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * x, jnp.ones_like(x)))
    assert gradients(wrapped, leaf([2.0]))[0].tolist() == [12.0]


def test_an_array_that_the_function_closes_over_is_a_constant():
    scale = jnp.array([3.0])
    assert gradients(in_torch(lambda x: x * scale), leaf([1.0]))[0].tolist() == [3.0]


def dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)


def test_a_key_that_is_passed_draws_the_same_mask_in_forward_and_backward():
    """Case 59."""
    wrapped = in_torch(lambda data, x: dropout(jax.random.wrap_key_data(data), x))
    x, key = leaf([1.0] * 100), torch.from_numpy(np.array(jax.random.key_data(jax.random.key(3))))
    y = wrapped(key, x)
    y.backward(torch.ones(100))
    assert torch.equal(x.grad, y)
    assert y.tolist() == dropout(jax.random.key(3), jnp.ones(100)).tolist()


def test_another_key_draws_another_mask_without_a_trace():
    fn, traces = traced(dropout)
    wrapped, x = in_torch(fn), torch.ones(100)
    first, second = (wrapped(torch.tensor([0, seed], dtype=torch.uint32), x) for seed in (1, 2))
    assert not torch.equal(first, second) and traces == [1]


def test_a_typed_key_in_a_result_is_refused_with_the_way_out():
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\[1\].*key_data"):
        in_torch(lambda x: (x, jax.random.key(0)))(torch.ones(1))


@pytest.mark.parametrize("order", ["0101", "1010"])
def test_a_tree_of_jax_alone_is_refused_where_it_has_arrays_whatever_came_before(order):
    f = in_torch(lambda x, full: (jax.tree_util.Partial(jnp.sin, *[x] * full), 2 * x))
    for full in map(int, order):
        if full:
            with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\[0\].*Partial is not a dense tensor"):
                f(torch.ones(2), full)
        else:
            assert f(torch.ones(2), full)[0].func is jnp.sin


def test_a_sparse_result_is_refused_by_path():
    from jax.experimental import sparse

    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\['s'\].*BCOO is not a dense tensor"):
        in_torch(lambda x: {"s": sparse.BCOO.fromdense(x)})(torch.eye(2))


def in_place(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x * 2
    return ref


def test_a_mutable_reference_may_be_used_inside():
    assert gradients(in_torch(lambda x: in_place(x)[...]), leaf([1.0]))[0].tolist() == [2.0]


def test_a_mutable_reference_in_a_result_is_refused_with_the_way_out():
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\[0\].*mutable reference.*return ref"):
        in_torch(lambda x: [in_place(x)])(leaf([1.0]))


def test_a_deleted_array_is_refused():
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(polybridge.UnsupportedTensorError, match="deleted or donated"):
        polybridge.convert(x, "torch")


def test_an_array_on_several_devices_is_gathered():
    code = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, polybridge
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((2,), ("i",))
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("i")))
        print(polybridge.convert(x, "torch").tolist())
    """
    assert run(code).strip() == "[0.0, 1.0, 2.0, 3.0]"


def test_results_and_cotangents_of_64_bits_pass_through_jax_with_32():
    """Of x**2 in float64, called from JAX with 64 bits off: 2 x, and 2 for the second derivative."""
    code = """
        import warnings
        import jax, jax.numpy as jnp, tensorflow as tf, torch, polybridge
        warnings.simplefilter("ignore", polybridge.PrecisionWarning)
        functions = {"torch": lambda x: x.double() ** 2, "tensorflow": lambda x: tf.cast(x, tf.float64) ** 2}
        for src, fn in functions.items():
            f, x = polybridge.wrap(fn, src=src, dst="jax"), jnp.array([1.0, 2.0])
            for call in (lambda t: t(), lambda t: jax.jit(t)()):
                print(call(lambda: jax.grad(lambda x: f(x).sum())(x)), call(lambda: jax.jvp(f, (x,), (x,))[1]))
                print(call(lambda: jax.hessian(lambda x: f(x).sum())(x)).diagonal(), call(lambda: f(x)).dtype)
    """
    assert run(code).split("\n")[:-1] == ["[2. 4.] [2. 8.]", "[2. 2.] float32"] * 4


@pytest.mark.parametrize("compiled", [True, False])
def test_denormals_survive(compiled):
    """Case 17: multiplying flushes them in JAX itself; moving does not."""
    with jax.disable_jit(not compiled):
        assert in_torch(lambda x: x)(torch.tensor([1e-40])).tolist() == torch.tensor([1e-40]).tolist()


# Functions that cannot be traced.


def branch(x):
    return x * 2 if x.sum() > 0 else x * 3


UNTRACEABLE = {
    "if": branch,
    "float": lambda x: x * float(jax.lax.stop_gradient(x).sum() > 0) * 2,
    "item": lambda x: x * (2 if jax.lax.stop_gradient(x[0]).item() > 0 else 3),
    "numpy": lambda x: x * float(np.sign(np.asarray(jax.lax.stop_gradient(x)))[0]) * 2,
    "mask": lambda x: x[jax.lax.stop_gradient(x) > -1] * 2,
    "index": lambda x: x * [3, 2][jax.lax.stop_gradient(x[0]).astype(int)],
}


@pytest.mark.parametrize("fn", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_a_function_of_values_runs_as_it_is_after_a_warning(fn):
    with pytest.warns(polybridge.UntracedWarning):
        assert gradients(in_torch(fn), leaf([1.0]))[0].tolist() == [2.0]


def test_the_warning_names_the_line_and_points_to_the_caller():
    with pytest.warns(polybridge.UntracedWarning) as caught:
        in_torch(branch)(torch.ones(2))
    line = branch.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} (TracerBoolConversionError)" in str(caught[0].message)
    assert (len(caught), caught[0].filename) == (1, __file__)


def test_the_warning_comes_once():
    wrapped = in_torch(branch)
    with pytest.warns(polybridge.UntracedWarning):
        wrapped(torch.ones(2))
    assert gradients(wrapped, leaf([-1.0]))[0].tolist() == [3.0]


def test_a_function_of_values_is_not_traced_again():
    runs = []
    wrapped, x = in_torch(lambda x: runs.append(1) or branch(x)), torch.ones(2)
    with pytest.warns(polybridge.UntracedWarning):
        wrapped(x)
    runs.clear()
    wrapped(x)
    assert len(runs) == 1


def test_a_call_on_values_is_no_part_of_what_jax_traces_around_it():
    wrapped, x, found = in_torch(lambda x: jnp.sin(x) * 2), leaf([0.5]), []

    def around(t):
        y = wrapped(x)
        found.append((y.item(), torch.autograd.grad(y.sum(), x)[0].item()))
        return t

    jax.jit(around)(1.0)
    np.testing.assert_allclose(found, [(2 * np.sin(0.5), 2 * np.cos(0.5))])


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
def test_a_function_of_values_has_a_second_derivative():
    x = leaf([2.0])
    (first,) = torch.autograd.grad(in_torch(lambda x: x**3 if x.sum() > 0 else x)(x), x, create_graph=True)
    assert torch.autograd.grad(first, x)[0].tolist() == [12.0]


@pytest.mark.filterwarnings("ignore::polybridge.UntracedWarning")
def test_a_custom_derivative_of_values_runs_as_it_is():
    fn = jax.custom_vjp(lambda x: x * 2)
    fn.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 5 if float(ct.sum()) > 0 else ct,))
    assert gradients(in_torch(fn), leaf([1.0]))[0].tolist() == [5.0]


def test_an_error_of_the_function_keeps_its_type_while_it_is_traced():
    def fail(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_torch(fail)(leaf([1.0]))


def test_what_cannot_be_traced_in_a_compiled_function_of_the_user_is_his_error():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        in_torch(jax.jit(branch))(torch.ones(2))


def test_disable_jit_of_the_caller_runs_operation_by_operation():
    seen = []
    wrapped = in_torch(lambda x: seen.append(float(x[0])) or x)
    with jax.disable_jit():
        x = torch.ones(2)
        wrapped(x).add_(1)
        wrapped(x).add_(1)
    assert seen == [1.0, 1.0] and x.tolist() == [1.0, 1.0]


# Ownership: XLA gives each result memory of its own, so torch may have it.


def test_a_trusted_function_of_torch_tensors_copies_nothing():
    wrapped, x = in_torch(lambda x: (jnp.exp(x), x, x.reshape(10, 100))), leaf([1.0] * 1000)
    for _ in range(3):
        torch.autograd.grad(wrapped(x)[0].sum(), x)
    with count_crossings() as counter:
        torch.autograd.grad(wrapped(x)[0].sum(), x, torch.tensor(1.0, dtype=torch.float64))
    assert (counter.copies, counter.bytes_copied) == (1, 8000)  # the cotangent of a sum, which has stride 0


SHARED = {
    "input": lambda x: (x, x),
    "view": lambda x: (x.reshape(3, 1), x.reshape(1, 3)),
    "result_twice": lambda x: (lambda y: (y, y))(x * 2),
    "residual": lambda x: (jnp.exp(x), jnp.tanh(x)),
    "constant": lambda x: (x * CONSTANT, CONSTANT),
    "compiled_inside": jax.jit(lambda x: (x, x * 1)),
}
CONSTANT = jnp.ones(3)


@pytest.mark.parametrize("fn", SHARED.values(), ids=SHARED)
def test_writing_to_a_result_changes_nothing_else(fn):
    """Cases 20 and 23."""
    wrapped, x = in_torch(fn), leaf([0.5, 1.0, 2.0])
    for _ in range(3):
        expected = [np.array(y) for y in fn(jnp.array(x.detach().numpy()))]
        y = wrapped(x)
        with torch.no_grad():
            y[0].detach().add_(100)
            np.testing.assert_allclose(y[1].numpy(force=True), expected[1])
        gradient = torch.autograd.grad(y[1].sum(), x, allow_unused=True)[0]
        native = jax.grad(lambda x: fn(x)[1].sum())(jnp.array(x.detach().numpy()))
        np.testing.assert_allclose(0 if gradient is None else gradient, native)
    assert x.tolist() == [0.5, 1.0, 2.0] and CONSTANT.tolist() == [1.0, 1.0, 1.0]


def test_writing_to_a_result_of_what_is_not_compiled_leaves_its_residuals_alone():
    """XLA would copy what it returns twice; a function that runs as it is does not."""
    wrapped, x = in_torch(jnp.exp), leaf([0.5, 1.0])
    with jax.disable_jit():
        y = wrapped(x)
        y.detach().add_(100)
        np.testing.assert_allclose(torch.autograd.grad(y.sum(), x)[0], np.exp([0.5, 1.0]))


def test_gradients_of_a_sum_do_not_share_memory():
    """Case 21."""
    a, b = leaf([1.0]), leaf([1.0])
    wrapped = in_torch(lambda a, b: a + b)
    for _ in range(2):
        wrapped(a, b).backward(torch.ones(1, dtype=torch.float64))
    assert (a.grad.item(), b.grad.item()) == (2.0, 2.0)


def test_a_write_to_an_input_after_the_call_comes_too_late_for_a_large_computation():
    x = torch.ones(1000, 1000)
    wrapped = in_torch(lambda x: jnp.sin(x @ x @ x))
    expected = wrapped(x)
    for _ in range(3):
        y = wrapped(x)
        x.zero_()
        assert torch.equal(y, expected)
        x.fill_(1)


# 64 bits, which a process has on or off.

OFF = """
    import warnings
    import jax, jax.numpy as jnp, torch, tensorflow as tf, polybridge
    def in_torch(fn):
        return polybridge.wrap(fn, src="jax", dst="torch")
    def in_tf(fn):
        return polybridge.wrap(fn, src="jax", dst="tf")
"""


def test_without_64_bits_a_float64_becomes_float32_with_one_warning():
    code = """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fn in (lambda x: x * 2, lambda x: x * 3):
            y = in_torch(fn)(torch.ones(2, dtype=torch.float64))
    print(y.dtype, [w.category.__name__ for w in caught])
    """
    assert run(OFF + code) == "torch.float32 ['PrecisionWarning']\n"


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_without_64_bits_gradients_have_the_dtype_of_their_input(dtype):
    code = f"""
    warnings.simplefilter("ignore")
    x = torch.tensor([2.0], dtype=torch.{dtype}, requires_grad=True)
    (first,) = torch.autograd.grad(in_torch(lambda x: x**3)(x).real.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.real.sum(), x)
    print(first.dtype, second.dtype, first.real.item(), second.real.item())
    """
    assert run(OFF + code) == f"torch.{dtype} torch.{dtype} 12.0 12.0\n"


@pytest.mark.parametrize("graph", [False, True])
def test_without_64_bits_gradients_have_the_dtype_of_their_input_in_tensorflow(graph):
    code = f"""
    warnings.simplefilter("ignore")
    fn, x = in_tf(lambda x: x**3), tf.constant([2.0], tf.float64)
    def orders(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(x)
            first = tape.gradient(y, x)
        return y, first, outer.gradient(first, x)
    for y in (tf.function(orders) if {graph} else orders)(x):
        print(y.dtype.name, float(y[0]))
    """
    assert run(OFF + code).splitlines() == ["float32 8.0", "float64 12.0", "float64 12.0"]


def test_without_64_bits_integers_that_fit_are_narrowed_and_others_refused():
    code = """
    wrapped = in_torch(lambda n, m: n + m)
    one = torch.tensor([1])
    print(wrapped(torch.tensor([2**31 - 2]), one))
    try:
        wrapped(one, torch.tensor([2**40 + 5]))
    except polybridge.UnsupportedTensorError as error:
        print("args[1]" in str(error), "do not fit into int32" in str(error))
    """
    assert run(OFF + code).splitlines() == ["tensor([2147483647], dtype=torch.int32)", "True True"]


def test_64_bits_may_be_switched_on_later():
    code = """
    warnings.simplefilter("ignore")
    fn, x = in_torch(lambda x: x * 2), torch.ones(1, dtype=torch.float64)
    graph = tf.function(in_tf(lambda x: x * 2))
    print(fn(x).dtype)
    jax.config.update("jax_enable_x64", True)
    print(fn(x).dtype)
    """
    assert run(OFF + code).splitlines() == ["torch.float32", "torch.float64"]


def test_a_backward_computes_in_the_precision_of_its_forward():
    code = """
    x = torch.tensor([1 / 3], dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(True):
        y = in_torch(lambda x: x * x)(x)
    warnings.simplefilter("ignore")
    print(torch.autograd.grad(y, x)[0].item() == 2 / 3)
    """
    assert run(OFF + code) == "True\n"
