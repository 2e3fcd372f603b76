"""Asks of each private name of a framework that polybridge uses that it still does what it is used for."""

import contextlib
import gc
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch._dynamo.testing
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import polybridge
from polybridge.backends.jax import convert as jax_convert
from polybridge.backends.jax import primitives
from polybridge.backends.tensorflow import _private
from polybridge.backends.torch import compiled, convert, native, source, transforms


def test_a_fresh_storage_has_one_user_and_a_view_makes_two():
    x = torch.ones(3) * 2
    assert convert.owns(x)
    other = x.detach()
    assert not convert.owns(x)
    del other
    assert convert.owns(x)


def test_a_residual_and_a_capsule_are_users_of_a_storage():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    out = y.detach()
    del y
    assert convert.owns(out)
    y = x.exp()  # saves its result for the backward
    out, edge = y.detach(), torch.autograd.graph.get_gradient_edge(y)
    del y
    assert not convert.owns(out)
    del edge
    capsule = convert.to_dlpack(out)
    assert not convert.owns(out)
    del capsule
    gc.collect()
    assert convert.owns(out)


def test_memory_of_numpy_is_not_owned():
    assert not convert.owns(torch.from_numpy(np.ones(3)))


def test_the_engine_takes_edges_and_returns_none_for_an_unused_input():
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x * 3)
    found = source._run_backward(
        (edge,), (torch.ones(2),), True, False, (x, unused), allow_unreachable=True, accumulate_grad=False
    )
    assert found[0].tolist() == [3.0, 3.0] and found[1] is None


def test_the_fake_mode_is_seen_while_it_is_on_and_not_from_outside_of_it():
    with FakeTensorMode() as mode:
        assert source.fake_mode() is mode
        with unset_fake_temporarily():
            assert source.fake_mode() is None
    assert source.fake_mode() is None


def test_a_disabled_function_mode_sees_nothing():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch._C.DisableTorchFunction():
        torch.ones(1).add_(1)
    assert seen == []


def test_a_tensor_is_followed_under_a_tape_and_under_an_accumulator():
    x, other = tf.constant(1.0), tf.constant(2.0)
    assert not _private.is_followed([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert _private.is_followed([x]) and _private.is_followed([x * 2]) and not _private.is_followed([other])
        assert _private.is_taped()
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)):
        assert _private.is_followed([x])
    assert not _private.is_taped()


def test_no_tape_records_in_a_gradient_that_tensorflow_pushes_forward_unless_it_is_apart():
    found = []

    def look(ct):
        for around in (contextlib.nullcontext, _private.apart):
            x = tf.constant(3.0)
            with around(), tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            found.append(tape.gradient(y, x))
        return [ct]

    x, y = tf.constant(1.0), tf.constant(2.0)
    with tf.autodiff.ForwardAccumulator(x, x):
        _private.record([y], [x], look)
    assert found[0] is None and found[1] == 6


def test_a_variable_that_is_not_trained_can_be_followed():
    variable = tf.Variable(2.0, trainable=False)
    _private.let_follow(variable)
    with tf.GradientTape() as tape:
        y = variable**2
    assert float(tape.gradient(y, variable)) == 4


def test_a_recorded_operation_gets_its_gradient():
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.constant(10.0) + 0
        _private.record([y], [x], lambda ct: [5 * ct])
    assert float(tape.gradient(y, x)) == 5


def test_gradients_of_a_tape_are_the_public_ones():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x**3
    ct = tf.constant([1.0, 10.0])
    public = tape.gradient(y, x, output_gradients=ct)
    tf.debugging.assert_equal(_private.gradients(tape, [y], [x], [ct])[0], public)


def test_a_callback_in_a_graph_gets_eager_tensors():
    seen = []

    @tf.function
    def f(x):
        (y,) = _private.py_function(lambda v: [seen.append(type(v)) or v + 1], [x], [tf.float32])
        return y

    assert float(f(tf.constant(1.0))) == 2
    assert seen == [type(tf.constant(0))]


def callback_by(vectorise):
    """Return a graph function with one callback, x + 1, that is vectorised by a function."""
    return lambda x: _private.py_function(lambda v: [v + 1], [x], [tf.float32], "its gradient", vectorise)[0]


def test_an_operation_is_converted_by_its_own_converter_and_asked_for_nobody():
    """It is given the stacked inputs, and the operation of one example returns zeros from then on."""
    seen = []

    def vectorise(batch):
        seen.append((batch.stacked, batch.reads(0)))
        return [batch.inputs[0] * 10]

    def body(x):
        y = callback_by(vectorise)(x)
        seen.append(_private.gradient_of(y.op))
        return y

    assert tf.vectorized_map(body, tf.constant([1.0, 2.0])).numpy().tolist() == [10, 20]
    assert seen == ["its gradient", ([True], False)]


def test_inputs_that_examples_share_are_stacked_on_demand():
    def vectorise(batch):
        assert batch.stacked == [False]
        batch.stack([0])
        assert batch.stacked == [True]
        return batch.inputs

    found = tf.vectorized_map(lambda i: callback_by(vectorise)(tf.constant(3.0)) + 0 * i, tf.zeros(2))
    assert found.numpy().tolist() == [3, 3]


@pytest.mark.parametrize("jit", [True, False])
def test_xla_is_seen_while_tracing(jit):
    seen = []
    tf.function(lambda x: (seen.append(_private.in_xla_context()), x + 1)[1], jit_compile=jit)(tf.constant(1.0))
    assert seen == [jit]


def test_the_runtime_has_started_once_something_was_computed():
    assert float(tf.constant(1.0) + 1) == 2
    assert _private.has_started()


# JAX.


def test_jax_takes_a_capsule_of_any_dtype_that_it_aligns():
    for x in (torch.arange(9.0)[1:], torch.tensor([True, False]), torch.ones(2, dtype=torch.bfloat16), torch.ones(())):
        found = jax_convert.from_dlpack(convert.to_dlpack(x))
        assert found.dtype.name == str(x.dtype).removeprefix("torch.")
        assert np.array(found).astype("float32").tolist() == x.float().tolist()


def test_jax_shares_the_memory_of_an_aligned_capsule():
    x = torch.ones(1000)
    assert jax_convert.from_dlpack(convert.to_dlpack(x)).unsafe_buffer_pointer() == x.data_ptr()


def test_a_capsule_of_jax_waits_for_its_values():
    x = jax.jit(lambda x: x @ x @ x)(jnp.full((700, 700), 1 / 700, "float32"))
    np.testing.assert_allclose(convert.from_dlpack(jax_convert.to_dlpack(x)), 1 / 700, rtol=1e-4)


def test_jax_arrays_carry_attributes():
    x = jnp.ones(3)
    assert not jax_convert.owns(x)
    jax_convert.own([x])
    assert jax_convert.owns(x) and not jax_convert.owns(x + 1)


def test_a_jax_array_whose_memory_was_given_away_owns_it_no_more():
    x = jnp.ones(3)
    for give in (jax_convert.to_dlpack, jax_convert.to_numpy):
        jax_convert.own([x])
        give(x)
        assert not jax_convert.owns(x)


CONSTANT = jnp.ones(1000)
ALIASES = {
    "inputs": lambda x: (x, x),
    "views": lambda x: (x.reshape(10, 100), x.reshape(100, 10)),
    "results": lambda x: (lambda y: (y, y, y.reshape(1000, 1)))(x * 2),
    "constants": lambda x: (x * 2, CONSTANT, CONSTANT),
    "compiled_inside": lambda x: jax.jit(lambda x: (x, x * 1))(x),
    "equal_expressions": lambda x: (jnp.sin(x), jnp.sin(x)),
}


@pytest.mark.parametrize("fn", ALIASES.values(), ids=ALIASES)
def test_results_of_compiled_code_share_memory_with_nothing(fn):
    """This is why `own` may say so."""
    compiled, x = jax.jit(fn), jnp.ones(1000)
    held = [x, CONSTANT, *compiled(x), *compiled(x)]
    assert len({a.unsafe_buffer_pointer() for a in held}) == len(held)


def test_jax_says_whether_a_client_exists():
    assert jax_convert.started()


# torch.


def test_the_innermost_saved_tensor_hooks_are_seen():
    found = torch._C._autograd._top_saved_tensors_default_hooks
    assert found(False) is None
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.relu):
        assert found(False) == (torch.clone, torch.relu)
    checkpoint = torch.utils.checkpoint.checkpoint
    hooks = checkpoint(lambda x: found(False), torch.ones(1), use_reentrant=False)
    assert hooks[0].__module__ == torch.utils.checkpoint.__name__


def test_autograd_records_again_inside_of_an_operation():
    x = torch.ones(1, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd(), compiled._as_called():
        assert (x * 2).requires_grad


def test_the_compiler_leaves_a_function_alone_that_it_is_told_to():
    def inner(x):
        assert not torch.compiler.is_compiling()
        return x * 2

    compiled._eval_frame.set_code_exec_strategy(inner.__code__, compiled._NEVER)
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(inner, backend=counter)(torch.ones(1))
    assert counter.frame_count == 0


def test_the_stack_of_function_transforms_is_seen_with_its_kinds():
    seen = []

    def look(x):
        seen.append([interpreter.key() for interpreter in get_interpreter_stack()])
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    assert seen == [[TransformType.Vmap, TransformType.Grad]]
    assert not get_interpreter_stack()


def test_a_level_of_forward_mode_is_seen():
    assert not transforms.is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert transforms.is_forward_mode()


def test_jax_asks_a_primitive_how_it_is_linearized(monkeypatch):
    asked = []

    def noted(*args, **params):
        asked.append(args[:2])
        return primitives._evaluate_linearized(*args, **params)

    monkeypatch.setitem(primitives.primitive_linearizations, primitives.evaluate_p, noted)
    _, pull = jax.vjp(polybridge.wrap(torch.sin, src="torch", dst="jax"), jnp.zeros(1))
    assert asked == [(True, [True])] and pull(jnp.ones(1)) == (1.0,)


def test_a_trace_of_jax_is_seen():
    seen = []
    jax.jit(lambda x: (seen.append(jax_convert.is_tracing()), x)[1])(jnp.ones(1))
    assert seen == [True] and not jax_convert.is_tracing()


def test_a_modules_weights_are_in_its_dicts_and_a_recurrent_one_finds_those_that_are_put_there():
    lstm = torch.nn.LSTM(2, 3)
    listed, refs = lstm._flat_weights, lstm._flat_weight_refs
    own = lstm._parameters["weight_ih_l0"]
    x = torch.ones(1, 1, 2)
    before = lstm(x)[0]
    lstm._parameters["weight_ih_l0"] = torch.zeros_like(own)
    assert not torch.equal(lstm(x)[0], before)
    lstm._parameters["weight_ih_l0"] = own
    lstm._flat_weights, lstm._flat_weight_refs = listed, refs
    assert torch.equal(lstm(x)[0], before) and lstm._flat_weights is listed


def test_keras_tells_whether_it_loads_a_file_in_its_safe_mode():
    from keras.src.saving.serialization_lib import SafeModeScope, in_safe_mode

    assert not in_safe_mode()
    with SafeModeScope(True):
        assert in_safe_mode()


def test_random_operations_are_tagged():
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.native_dropout.default.tags
    assert torch.Tag.nondeterministic_seeded not in torch.ops.aten.relu.default.tags


def graph(fn, x):
    return tf.function(fn, autograph=False).get_concrete_function(tf.TensorSpec(x.shape, x.dtype))


def test_a_graph_and_its_derivative_are_two_functions_that_share_what_the_forward_keeps():
    x = tf.constant([1.0, 2.0])
    pair = _private.GraphPair(graph(lambda x: [tf.exp(x), tf.cast(x, tf.int32), x * 3.0], x))
    results, pull = pair([x])
    np.testing.assert_allclose(results[0], np.exp([1, 2]), rtol=1e-6)
    cts = [tf.ones(2), tf.zeros(2, tf.int32), tf.ones(2)]
    for _ in range(2):
        (found,) = pull(cts)
        np.testing.assert_allclose(found, np.exp([1, 2]) + 3, rtol=1e-6)


def test_a_graph_that_draws_or_reads_is_not_pure():
    x, variable = tf.constant([1.0]), tf.Variable(1.0)
    assert _private.is_pure(graph(lambda x: tf.random.stateless_uniform([1], [1, 2]) + x, x))
    assert not _private.is_pure(graph(lambda x: tf.random.uniform([1]) + x, x))
    assert not _private.is_pure(graph(lambda x: variable * x, x))


def test_a_graph_run_as_written_gives_the_bits_of_eager_operations():
    rng = np.random.default_rng(0)
    x, w, b = (tf.constant(rng.standard_normal(s).astype("float32")) for s in ((32, 64), (64, 128), (128,)))

    def fn(x):
        return tf.tanh(tf.matmul(x, w) + b)

    options = _private.context.context().function_call_options
    with _private.as_written():
        found = graph(fn, x)(x)
    assert _private.context.context().function_call_options is options
    assert found.numpy().tobytes() == fn(x).numpy().tobytes()


def test_keras_s_generator_collects_and_lists_as_polybridge_reads():
    import keras
    from keras.src.random.seed_generator import global_seed_generator

    generator, layer = global_seed_generator(), keras.layers.Dense(2)
    layer.build((None, 3))
    assert generator is global_seed_generator() and tuple(generator.state.shape) == (2,)
    assert layer._flatten_layers() == [layer] and len(layer._trainable_variables) == 2
    assert layer._loss_ids == set() and layer.kernel._dtype == "float32" and layer._seed_generators == []
    with keras.StatelessScope() as scope:
        scope.state_mapping[id(layer.kernel)] = tf.ones((3, 2), tf.float64)
        assert layer.kernel.value.dtype == tf.float64


def test_tf_runs_a_function_of_recompute_grad_in_frames_of_that_name():
    tf.compat.v1.reset_default_graph()  # a loop that raised elsewhere leaves what `tf.recompute_grad` refuses
    seen = []

    def looks(x):
        frame, names = sys._getframe(), []
        while frame is not None:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        seen.append(any(name.startswith("recompute_grad.<locals>") for name in names))
        return x * x

    x = tf.ones(1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.recompute_grad(looks)(x)
    tape.gradient(y, x)
    assert seen == [True, True]


def test_jax_has_a_set_of_primitives_whose_lowering_knows_its_devices():
    assert primitives.evaluate_p in primitives.prim_requires_devices_during_lowering


def test_what_is_no_plain_tensor_of_torch_says_so():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    assert all(hasattr(kind, "__tensor_flatten__") for kind in (AsyncCollectiveTensor, DTensor))
    assert hasattr(DTensor, "full_tensor") and hasattr(AsyncCollectiveTensor, "wait")


def test_tf_tells_a_callback_of_operations_and_of_functions_that_it_runs():
    traced = tf.function(lambda: tf.random.uniform([2]))
    traced()
    for draw, draws in ((traced, True), (lambda: tf.random.normal([2]), True), (lambda: tf.ones(2), False)):
        with _private.drawing() as drawn:
            draw()
        assert drawn() is draws
        with tf.Graph().as_default(), _private.drawing() as drawn:
            draw()
        assert drawn() is draws


def test_torch_recomputes_in_frames_and_under_hooks_of_known_names():
    assert torch.utils.checkpoint.CheckpointFunction.forward.__qualname__ == "CheckpointFunction.forward"
    seen = []

    def looks(x):
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(False)[0].__module__)
        return x * x

    torch.utils.checkpoint.checkpoint(looks, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == ["torch.utils.checkpoint"]


def test_a_layer_of_keras_asks_its_policy_for_the_dtype_at_each_call():
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    assert layer(tf.ones((1, 3))).dtype == tf.bfloat16 and layer.kernel.dtype == "float32"
    layer.dtype_policy = keras.DTypePolicy("float32")
    assert layer(tf.ones((1, 3))).dtype == tf.float32


def test_a_checkpoint_makes_a_frame_of_the_function_that_it_runs_again():
    from polybridge.backends.torch import checkpoints

    counted = []
    with checkpoints.noticing(lambda fn, *args, **kwargs: counted.append(fn) or fn(*args, **kwargs)):
        y = torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert not counted
    y.backward()
    assert len(counted) == 1


@pytest.mark.parametrize("marked", [False, True])
def test_autograph_lets_a_marked_exception_pass(marked):
    error = ValueError("mine")
    if marked:
        _private.keep_from_autograph(error)

    @_private.not_for_autograph
    def fails():
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        tf.function(lambda: fails())()
    assert (caught.value is error) == marked


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.nonzero()], ids=["value", "shape"])
def test_a_fake_tensor_that_is_asked_for_values_raises_what_is_known(read):
    with FakeTensorMode(), pytest.raises(source._VALUELESS):
        read(torch.ones(1))


@pytest.mark.parametrize("wrapper", [lambda f: f, tf.function(autograph=False)], ids=["eager", "graph"])
def test_what_is_to_be_kept_is_not_recomputed(wrapper):
    tf.compat.v1.reset_default_graph()  # a loop that raised elsewhere leaves what `tf.recompute_grad` refuses
    calls = []
    recomputed = tf.recompute_grad(lambda x: calls.append(x) or x**2)

    def slope(keeps, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with _private.keeping() if keeps else contextlib.nullcontext():
                y = recomputed(x)
        return tape.gradient(y, x)

    for keeps, expected in ((False, 2), (True, 1)):
        calls.clear()
        assert float(wrapper(partial(slope, keeps))(tf.constant(3.0))) == 6
        assert len(calls) == expected


def test_nothing_is_open_outside_of_modes_and_transforms():
    opened = []

    def looked(x):
        opened.append((native._open_modes(), native._are_transforms_active()))
        return x

    looked(torch.ones(2))
    with FakeTensorMode():
        looked(torch.ones(2))
    torch.vmap(looked)(torch.ones(2))
    torch.func.grad(lambda x: looked(x).sum())(torch.ones(2))
    assert opened == [(0, False), (1, False), (0, True), (0, True)]


def test_an_autograd_function_may_be_applied_without_the_look_for_transforms():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, x):
            return x * number

        @staticmethod
        def backward(ctx, ct):
            return None, ct * 2

    x = torch.ones(3, requires_grad=True)
    y = super(torch.autograd.Function, Double).apply(2, x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.grad_fn is not None and torch.equal(gradient, torch.full((3,), 2.0))


def test_a_capsule_becomes_a_tensor_on_its_memory():
    x = torch.ones(3)
    assert convert.from_dlpack(convert.to_dlpack(x)).data_ptr() == x.data_ptr()


def test_the_default_group_is_none_outside_of_distributed_runs():
    assert convert._distributed._world.default_pg is torch.distributed.group.WORLD is None
    assert convert.is_distributed() is torch.distributed.is_initialized()


def test_an_edge_of_an_operation_of_torch_is_its_node_and_number():
    x = torch.ones(3, requires_grad=True)
    first, second = x.unbind()[0], x.unbind()[1]
    for y in (x * 2, first, second):
        assert source._edge(y) == torch.autograd.graph.get_gradient_edge(y)


def test_operations_that_draw_are_tagged():
    drawing = [torch.ops.aten.rand.default, torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli_.float]
    assert all(map(source._may_draw, drawing))
    assert not any(map(source._may_draw, [torch.ops.aten.sin.default, torch.ops.aten.convolution.default]))


def test_a_trace_of_jax_is_seen_on_its_thread():
    seen = []

    def looked(x):
        seen.append(jax_convert.is_tracing())
        return x

    looked(jnp.ones(2))
    jax.jit(looked)(jnp.ones(2))
    jax.vmap(looked)(jnp.ones(2))
    with jax.core.eval_context():
        looked(jnp.ones(2))
    assert seen == [False, True, True, False]


@pytest.mark.parametrize("on", [False, True])
def test_the_switch_of_64_bits_is_read(on):
    with jax.enable_x64(on):
        assert jax_convert.narrows() is not on
    assert jax_convert.narrows() is not jax.config.jax_enable_x64


def test_transforms_may_be_left_for_a_while():
    inside = []

    def looked(x):
        with native.temporarily_clear_interpreter_stack():
            inside.append((native._are_transforms_active(), type(torch.ones(2).numpy())))
        return x * native._are_transforms_active()

    assert torch.equal(torch.vmap(torch.func.grad(lambda x: looked(x).sum()))(torch.ones(2, 3)), torch.ones(2, 3))
    assert inside == [(False, np.ndarray)]


def test_a_node_knows_the_shapes_and_dtypes_of_its_results():
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1, x.double().sum()

        @staticmethod
        def backward(ctx, *cts):
            known.extend((tuple(y.shape), y.dtype) for y in ctx._input_metadata)
            return cts[0]

    known = []
    Two.apply(torch.ones(3, requires_grad=True))[0].sum().backward()
    assert known == [((3,), torch.float32), ((), torch.float64)]


def test_what_transforms_have_wrapped_is_found():
    found = []

    def looked(x):
        found.append(transforms._unwrapped(x))
        return x.sum()

    x = torch.ones(2, 3, requires_grad=True)
    torch.vmap(torch.func.grad(looked))(x)
    assert found[0].shape == (2, 3) and found[0].requires_grad and not is_functorch_wrapped_tensor(found[0])


def test_tensorflow_tells_of_asynchronous_execution(monkeypatch):
    tf.constant(0.0)  # so that there is a context
    waited = []
    monkeypatch.setattr(_private.context, "async_wait", lambda: waited.append(True))
    _private.await_pending()
    assert not waited
    try:
        tf.config.experimental.set_synchronous_execution(False)
        _private.await_pending()
    finally:
        tf.config.experimental.set_synchronous_execution(True)
    assert waited == [True]
    _private.await_pending()
    assert waited == [True]
