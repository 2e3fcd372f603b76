"""Asks what happens where something cannot work: an error that names the place and the way out, never an abort."""

import functools
import gc
import os
import subprocess
import sys
import traceback
import typing
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from flax import linen, nnx
from keras.layers import Dense

import polybridge
from polybridge import DetachedStateWarning
from tests.pairs.isolation import isolated


class Pair(typing.NamedTuple):
    first: object
    second: object


def in_torch(fn, **options):
    return polybridge.wrap(fn, src="tensorflow", dst="torch", **options)


def in_tf(fn, **options):
    return polybridge.wrap(fn, src="torch", dst="tensorflow", **options)


# Tensors of another framework.

PLACES = {
    "args[0]": lambda x: ((x,), {}),
    "args[1]": lambda x: ((1, x), {}),
    "args[0]['weights'][1]": lambda x: (({"weights": [None, x]},), {}),
    "kwargs['scale']": lambda x: ((), {"scale": x}),
    "kwargs['scale'][0]": lambda x: ((), {"scale": (x,)}),
}


@pytest.mark.parametrize("path", PLACES)
def test_tensor_of_the_source_is_refused_by_path(pair, src, dst, path):
    args, kwargs = PLACES[path](x := src.tensor([1.0]))
    with pytest.raises(polybridge.WrongFrameworkError) as caught:
        pair.wrap(lambda *args, **kwargs: None)(*args, **kwargs)
    message = str(caught.value)
    assert f"takes {dst.name} tensors, but {path} is a {type(x).__module__}." in message
    assert f'polybridge.convert({path}, "{dst.name}")' in message


def test_wrong_framework_is_a_type_error_of_polybridge(pair, src):
    with pytest.raises(TypeError) as caught:
        pair.wrap(src.sin)(src.tensor([1.0]))
    assert isinstance(caught.value, polybridge.ArgumentError)


def test_the_message_names_the_function_and_both_frameworks(pair, src):
    def loss_of_model(x):
        return x

    with pytest.raises(polybridge.WrongFrameworkError, match=rf"loss_of_model \(src='{src.name}', dst='\w+'\)"):
        pair.wrap(loss_of_model)(src.tensor([1.0]))


@pytest.mark.parametrize(
    "result, path",
    [(lambda y: y, "result"), (lambda y: {"loss": [0, y]}, r"result\['loss'\]\[1\]")],
    ids=["bare", "nested"],
)
def test_result_of_another_framework_is_refused_by_path(pair, src, dst, result, path):
    foreign = dst.tensor([1.0])
    with pytest.raises(polybridge.OutputError, match=rf"wraps a {src.name} function.*{path}"):
        pair.wrap(lambda x: result(foreign))(dst.tensor([1.0]))


# Tensors that cannot cross. TensorFlow aborts on some, so each runs in a process of its own.


TF_REFUSED = {
    "string": lambda: tf.constant(["text"]),
    "scalar_string": lambda: tf.constant("text"),
    "empty_string": lambda: tf.zeros([0], tf.string),
    "ragged": lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]),
    "sparse": lambda: tf.sparse.from_dense([[1.0, 0.0]]),
    "indexed_slices": lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])),
    "quantised": lambda: tf.cast(tf.constant([1, 2]), tf.qint8),
    "quantised_32": lambda: tf.cast(tf.constant([1, 2]), tf.qint32),
    "float8": lambda: tf.cast(tf.constant([1.0]), tf.dtypes.experimental.float8_e4m3fn),
    "float8_e5m2": lambda: tf.cast(tf.constant([1.0]), tf.dtypes.experimental.float8_e5m2),
    "int4": lambda: tf.cast(tf.constant([1]), tf.dtypes.experimental.int4),
    "tensor_array": lambda: tf.TensorArray(tf.float32, 2).unstack(tf.ones([2, 3])),
    "optional": lambda: tf.experimental.Optional.from_value(tf.ones(2)),
    "variant": lambda: tf.raw_ops.OptionalFromValue(components=[tf.ones(2)]),
    "resource": lambda: tf.Variable(1.0).handle,
    "string_variable": lambda: tf.Variable("text"),
    "symbolic_keras": lambda: keras.Input((3,)),
}

TORCH_REFUSED = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.ones(2).to(torch.float8_e5m2),
    "complex_half": lambda: torch.ones(2).to(torch.complex32),
    "meta": lambda: torch.ones(2, device="meta"),
    "mkldnn": lambda: torch.ones(2).to_mkldnn(),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)),
}
REFUSED = [pytest.param("tensorflow", name, id=f"tensorflow-{name}") for name in TF_REFUSED]
REFUSED += [pytest.param("torch", name, id=f"torch-{name}") for name in TORCH_REFUSED]


def given(owner, name):
    """Pass the tensor to a function of the other framework, deep inside an argument."""
    x = {"tensorflow": TF_REFUSED, "torch": TORCH_REFUSED}[owner][name]()
    wrap = in_tf if owner == "tensorflow" else in_torch
    return refusal(lambda: wrap(lambda tree: tree)({"leaf": [x]}))


def returned(owner, name):
    """Return the tensor from a wrapped function, deep inside its result."""
    make = {"tensorflow": TF_REFUSED, "torch": TORCH_REFUSED}[owner][name]
    wrapped = (in_torch if owner == "tensorflow" else in_tf)(lambda: {"leaf": [make()]})
    return refusal(wrapped)


def refusal(call):
    """Return the base classes and the message of what a call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [], f"returned a {type(call())}"
        except Exception as error:
            return [cls.__name__ for cls in type(error).__mro__], f"{error}\n{traceback.format_exc()}"


def test_a_fake_tensor_gives_fake_results():
    """It has no values to cross with, but a shape and a dtype."""
    shape, dtype, kind = isolated(_of_a_fake).result()
    assert (shape, dtype, kind) == ((2,), "torch.float32", "FakeTensor")


def _of_a_fake():
    y = in_torch(lambda x: x * 2)(TORCH_REFUSED["fake"]())
    return tuple(y.shape), str(y.dtype), type(y).__name__


@pytest.mark.parametrize("owner, name", [case for case in REFUSED if case.id != "torch-fake"])
def test_argument_that_cannot_cross_is_a_type_error_that_names_it(owner, name):
    """Case 15."""
    classes, message = isolated(given, owner, name).result()
    assert "UnsupportedTensorError" in classes, message
    assert "args[0]['leaf'][0] cannot cross" in message


@pytest.mark.parametrize("owner, name", REFUSED)
def test_result_that_cannot_cross_is_a_type_error_that_names_it(owner, name):
    """Case 15."""
    classes, message = isolated(returned, owner, name).result()
    assert "UnsupportedTensorError" in classes, message
    assert "result['leaf'][0] cannot cross" in message


def test_unsupported_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="string"):
        in_tf(lambda x: x)(tf.constant("text"))


def test_the_way_out_of_a_dtype_that_cannot_cross_is_a_cast():
    x = torch.ones(2).to(torch.float8_e4m3fn)
    assert in_torch(lambda x: x * 2)(x.float()).tolist() == [2.0, 2.0]


ARRAYS = {
    "object": lambda: np.array([None, "a"], object),
    "str": lambda: np.array(["text"]),
    "bytes": lambda: np.array([b"text"]),
    "string_dtype": lambda: np.array(["text"], np.dtypes.StringDType()),
    "datetime64": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta64": lambda: np.array([1], "timedelta64[s]"),
    "structured": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "void": lambda: np.zeros(2, "V4"),
    "longdouble": lambda: np.ones(2, "longdouble"),
    "complex_longdouble": lambda: np.ones(2, "clongdouble"),
    "float8": lambda: np.ones(2, ml_dtypes.float8_e4m3fn),
    "int4": lambda: np.ones(2, ml_dtypes.int4),
    "str_scalar": lambda: np.str_("text"),
    "datetime_scalar": lambda: np.datetime64("2020-01-01"),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_numpy_dtype_that_is_no_tensors_is_refused_by_path(pair, make):
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"kwargs\['a'\] cannot cross.*NumPy dtype"):
        pair.wrap(lambda a: a)(a=make())


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_numpy_dtype_that_is_no_tensors_is_refused_in_a_result(pair, make):
    with pytest.raises(polybridge.UnsupportedTensorError, match=r"result\[0\] cannot cross.*NumPy dtype"):
        pair.wrap(lambda: [make()])()


# Results that have no derivative.


@pytest.mark.parametrize("result", [None, 3, "text", [], {"a": None}], ids=repr)
def test_no_tensor_where_a_derivative_is_asked_is_an_error(pair, dst, result):
    with pytest.raises(polybridge.OutputError, match="returned no tensor") as caught:
        dst.gradient(pair.wrap(lambda x: result), dst.tensor([1.0]))
    assert isinstance(caught.value, TypeError)


def test_no_tensor_is_fine_where_gradients_are_off():
    with torch.no_grad():
        assert in_torch(lambda x: None)(torch.ones(2, requires_grad=True)) is None


def test_integers_alone_are_not_differentiable_in_torch():
    y = in_torch(tf.argmax)(torch.ones(2, requires_grad=True))
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.backward()


# Exceptions of the user's function.


class OwnError(Exception):
    """Has a constructor that nobody else can call, and data."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


RAISED = {
    "own": lambda: OwnError(42, detail=[1]),
    "value": lambda: ValueError("bad"),
    "type": lambda: TypeError("bad"),
    "stop_iteration": lambda: StopIteration("done"),
    "memory": lambda: MemoryError("none"),
    "keyboard": lambda: KeyboardInterrupt(),
    "exit": lambda: SystemExit(3),
    "assertion": lambda: AssertionError("no"),
    "not_implemented": lambda: NotImplementedError("later"),
}


def failing(src, where, error):
    """Return a function of `src` that raises `error()` in its forward or its backward while `armed` is not empty."""
    armed = []

    def check():
        if armed:
            raise error()

    if src.name == "torch":

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, ct):
                check()
                return ct * 2

        inner = Fails.apply
    elif src.name == "jax":

        def backward(_, ct):
            check()
            return (ct * 2,)

        inner = jax.custom_vjp(lambda x: x * 2)
        inner.defvjp(lambda x: (x * 2, None), backward)
    else:

        @tf.custom_gradient
        def inner(x):
            def gradient(ct):
                check()
                return ct * 2

            return x * 2, gradient

    def fn(x):
        if where == "forward":
            check()
        return inner(x)

    return fn, armed


@pytest.mark.parametrize("error", RAISED.values(), ids=RAISED)
@pytest.mark.parametrize("before", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_reaches_the_user_with_its_own_type(pair, src, dst, where, before, error):
    """Case 58."""
    fn, armed = failing(src, where, error)
    wrapped, x = pair.wrap(fn), dst.tensor([1.0])
    for _ in range(before):
        dst.gradient(wrapped, x)
    armed.append(1)
    if src.traces:  # runs again where it has not been yet
        x = dst.tensor([1.0, 2.0])
    with pytest.raises(BaseException) as caught:
        dst.gradient(wrapped, x)
    assert type(caught.value) is type(error()) and str(caught.value) == str(error())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_is_the_very_object_that_was_raised(pair, src, dst, where):
    raised = OwnError(42, detail=[1])
    fn, armed = failing(src, where, lambda: raised)
    armed.append(1)
    with pytest.raises(OwnError) as caught:
        dst.gradient(pair.wrap(fn), dst.tensor([1.0]))
    assert caught.value is raised and caught.value.detail == [1]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_traceback_leads_to_the_users_line(pair, src, dst, where):
    fn, armed = failing(src, where, lambda: OwnError(42, detail=[1]))
    armed.append(1)
    with pytest.raises(OwnError) as caught:
        dst.gradient(pair.wrap(fn), dst.tensor([1.0]))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "check"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_function_works_after_it_has_raised(pair, src, dst, where):
    fn, armed = failing(src, where, lambda: OwnError(42, detail=[1]))
    wrapped, x = pair.wrap(fn), dst.tensor([1.0])
    armed.append(1)
    for _ in range(2):
        with pytest.raises(OwnError):
            dst.gradient(wrapped, x)
    armed.clear()
    assert dst.gradient(wrapped, x) == [2.0]


def test_exception_of_the_source_framework_reaches_the_user(pair, src, dst):
    error = {"torch": RuntimeError, "tensorflow": tf.errors.InvalidArgumentError, "jax": TypeError}[src.name]
    with pytest.raises(error, match=r"(?i)size|shape|incompatible"):
        pair.wrap(lambda a, b: a @ b)(dst.tensor(np.ones((2, 3))), dst.tensor(np.ones((2, 3))))


def test_exception_keeps_no_argument_alive(pair, src, dst):
    wrapped = pair.wrap(failing_always)
    x = dst.tensor([1.0] * 100)
    alive = weakref.ref(x)
    with pytest.raises(OwnError):
        wrapped(x)
    del x
    gc.collect()
    assert alive() is None


def failing_always(x):
    raise OwnError(1, detail=None)


# Wrong arguments of `wrap`.


@pytest.mark.parametrize("fn", [3, "name", [len]], ids=repr)
def test_what_cannot_be_called_cannot_be_wrapped(fn):
    with pytest.raises(polybridge.NotCallableError, match="expects a callable, got") as caught:
        in_torch(fn)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("src, dst", [("tensorfow", "torch"), ("torch", "tensorfow")])
def test_an_unknown_framework_is_an_error_with_a_near_name(src, dst):
    with pytest.raises(polybridge.UnknownBackendError, match=r"'tensorfow'.*Did you mean 'tensorflow'"):
        polybridge.wrap(len, src=src, dst=dst)


def test_a_missing_argument_is_pythons_own_error(pair, dst):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        pair.wrap(lambda a, b: a)(dst.tensor([1.0]))


def test_an_argument_that_the_function_does_not_take_is_pythons_own_error(pair, dst):
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        pair.wrap(lambda a: a)(dst.tensor([1.0]), c=1)


# Trainable state that the function closes over.


class TorchModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)

    def score(self, x):
        return self.inner(x).sum()


class TFModule(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable([2.0], name="kernel")

    def __call__(self, x):
        return x * self.kernel

    def score(self, x):
        return x * self.kernel


def torch_closure():
    scale = torch.nn.Parameter(torch.ones(2))
    return lambda x: x * scale


def torch_plain_tensor():
    scale = torch.ones(2, requires_grad=True)
    return lambda x: x * scale


def torch_module_in_closure():
    model = TorchModel()
    return lambda x: model(x)


def torch_partial():
    return functools.partial(lambda scale, x: x * scale, torch.nn.Parameter(torch.ones(2)))


def torch_list_in_closure():
    layers = [torch.nn.Linear(2, 2)]
    return lambda x: layers[0](x)


def tf_closure():
    scale = tf.Variable([2.0], name="scale")
    return lambda x: x * scale


def tf_function_closure():
    scale = tf.Variable([2.0], name="scale")
    return tf.function(lambda x: x * scale)


def keras_layer():
    layer = keras.layers.Dense(2, name="dense_of_mine")
    layer.build((None, 2))
    return lambda x: layer(x)


def keras_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="dense_of_mine")])
    return lambda x: model(x)


def tf_module_in_closure():
    module = TFModule()
    return lambda x: module(x)


CLOSED_OVER = {
    "torch_closure": (torch_closure, in_tf, ["scale"]),
    "torch_plain_tensor": (torch_plain_tensor, in_tf, ["scale"]),
    "torch_method": (lambda: TorchModel().score, in_tf, ["inner.weight", "inner.bias"]),
    "torch_module_in_closure": (torch_module_in_closure, in_tf, ["model.inner.weight", "model.inner.bias"]),
    "torch_partial": (torch_partial, in_tf, ["scale"]),
    "torch_list_in_closure": (torch_list_in_closure, in_tf, ["(2, 2)", "(2,)"]),
    "tf_closure": (tf_closure, in_torch, ["scale"]),
    "tf_function": (tf_function_closure, in_torch, ["scale"]),
    "tf_module_in_closure": (tf_module_in_closure, in_torch, ["kernel"]),
    "tf_method": (lambda: TFModule().score, in_torch, ["kernel"]),
    "keras_layer": (keras_layer, in_torch, ["dense_of_mine/kernel", "dense_of_mine/bias"]),
    "keras_model": (keras_model, in_torch, ["dense_of_mine/kernel", "dense_of_mine/bias"]),
}


def train(wrap, wrapped):
    """Call a wrapped function as a training step does."""
    if wrap is in_torch:
        return wrapped(torch.ones(1, 2, requires_grad=True))
    x = tf.ones([1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        return wrapped(x)


@pytest.mark.parametrize("make, wrap, names", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_trainable_state_of_the_function_is_named_in_a_warning(make, wrap, names):
    """Case 35."""
    wrapped = wrap(make())
    with pytest.warns(DetachedStateWarning, match="gets no gradient") as caught:
        train(wrap, wrapped)
    assert len(caught) == 1
    assert [name for name in names if name not in str(caught[0].message)] == []


@pytest.mark.parametrize("make, wrap, names", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_the_warning_comes_once(make, wrap, names):
    wrapped = wrap(make())
    with pytest.warns(DetachedStateWarning):
        train(wrap, wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(wrap, wrapped)


@pytest.mark.parametrize("make, wrap, names", CLOSED_OVER.values(), ids=CLOSED_OVER)
@pytest.mark.filterwarnings("error")
def test_there_is_no_warning_under_no_grad(make, wrap, names):
    wrapped = wrap(make())
    with torch.no_grad():
        train(wrap, wrapped)


@pytest.mark.parametrize("make, wrap, names", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_the_warning_comes_after_calls_under_no_grad(make, wrap, names):
    wrapped = wrap(make())
    with torch.no_grad():
        train(wrap, wrapped)
    with pytest.warns(DetachedStateWarning):
        train(wrap, wrapped)


def test_the_warning_comes_where_no_input_needs_a_gradient():
    """The data of a training step needs none, yet the weights inside the function never train."""
    with pytest.warns(DetachedStateWarning, match="scale"):
        in_torch(tf_closure())(torch.ones(2))
    with pytest.warns(DetachedStateWarning, match="scale"), tf.GradientTape():
        in_tf(torch_closure())(tf.ones(2))


def test_the_warning_points_to_the_callers_line():
    with pytest.warns(DetachedStateWarning) as caught:
        in_torch(tf_closure())(torch.ones(2, requires_grad=True))
    assert caught[0].filename == __file__


def frozen_torch():
    scale = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return lambda x: x * scale


def buffer_of_module():
    module = torch.nn.Module()
    module.register_buffer("scale", torch.ones(2))
    return lambda x: x * module.scale


def detached_torch():
    scale = torch.nn.Parameter(torch.ones(2))
    return lambda x: x * scale.detach()


def frozen_tf():
    scale = tf.Variable([2.0], trainable=False)
    return lambda x: x * scale


def constant_tf():
    scale = tf.constant([2.0])
    return lambda x: x * scale


def frozen_keras():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.trainable = False
    return lambda x: model(x)


def unused_torch():
    scale = torch.nn.Parameter(torch.ones(2))
    return lambda x: (x * 2, scale.shape)[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make, wrap",
    [
        (frozen_torch, in_tf),
        (buffer_of_module, in_tf),
        (detached_torch, in_tf),
        (unused_torch, in_tf),
        (frozen_tf, in_torch),
        (constant_tf, in_torch),
        (frozen_keras, in_torch),
    ],
)
def test_state_that_does_not_train_causes_no_warning(make, wrap):
    train(wrap, wrap(make()))


@pytest.mark.filterwarnings("error")
def test_state_that_is_passed_causes_no_warning():
    weight = torch.nn.Parameter(torch.ones(2))
    in_torch(lambda w, x: w * x)(weight, torch.ones(2)).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_the_warning_can_be_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DetachedStateWarning)
        with pytest.raises(DetachedStateWarning, match="scale"):
            in_torch(tf_closure())(torch.ones(2, requires_grad=True))


def test_the_message_tells_how_to_pass_the_state():
    with pytest.warns(DetachedStateWarning, match="Pass it as an argument"):
        in_torch(tf_closure())(torch.ones(2, requires_grad=True))


# What `wrap` is given.


@pytest.mark.parametrize(
    "cls", [torch.nn.Linear, keras.layers.Dense, tf.Module, nnx.Linear, linen.Dense, eqx.nn.Linear]
)
@pytest.mark.parametrize("options", [{}, {"src": "jax"}], ids=["alone", "with_src"])
@pytest.mark.parametrize("dst", ["torch", "tf", "jax", "numpy", "keras"])
def test_a_class_in_place_of_a_module_is_refused(cls, dst, options):
    with pytest.raises(
        polybridge.NotCallableError, match=rf"the class {cls.__name__}.*`polybridge.wrap\({cls.__name__}"
    ):
        polybridge.wrap(cls, dst=dst, **options)


def test_a_class_of_values_is_a_function(pair, dst):
    f = pair.wrap(Pair)
    assert dst.numpy(f(dst.tensor([1.0]), 2).first).tolist() == [1.0]


@pytest.mark.parametrize("name", [["tf"], None, 3, {}], ids=str)
@pytest.mark.parametrize("role", ["src", "dst"])
def test_a_name_that_is_none_is_unknown(name, role):
    with pytest.raises((polybridge.UnknownBackendError, TypeError), match=r"No backend is named|needs src="):
        polybridge.wrap(lambda x: x, **{"src": "torch", "dst": "jax", role: name})


def test_a_module_in_place_of_a_name_is_recognised():
    with pytest.raises(polybridge.UnknownBackendError, match="Did you mean 'tensorflow'"):
        polybridge.wrap(lambda x: x, src="torch", dst=tf)


@pytest.mark.parametrize(
    ("dst", "option", "meant"),
    [("torch", "factoy", "factory"), ("tf", "nam", "name"), ("jax", "copied", "copy"), ("flax", "rng", "rngs")],
)
def test_an_option_that_a_module_does_not_take_is_refused(dst, option, meant):
    module = keras.layers.Dense(2) if dst == "torch" else torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=rf"takes no {option}=.*Did you mean '{meant}'"):
        polybridge.wrap(module, dst=dst, **{option: None})


def test_a_misspelt_option_of_a_function_is_recognised():
    with pytest.raises(TypeError, match="Did you mean 'output_specs'"):
        in_torch(lambda x: x, ouput_specs=None)


BAD_SPECS = {
    "tf.TensorSpec": (TypeError, lambda: tf.TensorSpec([None], tf.float32), r"Give a `polybridge\.TensorSpec"),
    "jax": (TypeError, lambda: jax.ShapeDtypeStruct((3,), "float32"), r"Give a `polybridge\.TensorSpec"),
    "tensor": (TypeError, lambda: torch.ones(2), r"Give a `polybridge\.TensorSpec"),
    "dtype": (ValueError, lambda: polybridge.TensorSpec((3,), torch.float32), "its dtype is no name"),
    "dtype_name": (ValueError, lambda: polybridge.TensorSpec((3,), "float"), "its dtype is no name"),
    "list": (ValueError, lambda: polybridge.TensorSpec([None, 3], "float32"), "a shape is a tuple"),
    "negative": (ValueError, lambda: polybridge.TensorSpec((-1, 3), "float32"), "a shape is a tuple"),
    "number": (ValueError, lambda: polybridge.TensorSpec(3, "float32"), "a shape is a tuple"),
}


@pytest.mark.parametrize(("kind", "spec", "message"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_a_promise_that_is_none_is_refused_at_once(kind, spec, message):
    with pytest.raises(kind, match=rf"output_specs\['y'\]\[0\] is .*{message}"):
        in_tf(lambda x: {"y": (x,)}, output_specs={"y": (spec(),)})


@pytest.mark.parametrize("tree", ["params", "state"])
@pytest.mark.parametrize("make", [lambda: torch.ones(2), lambda: tf.ones(2), lambda: tf.Variable([1.0])])
def test_weights_of_another_framework_are_refused(make, tree):
    trees = {"params": {"w": jax.numpy.ones(2)}, tree: {"w": [make()]}}
    with pytest.raises(polybridge.WrongFrameworkError, match=rf"takes jax tensors, but {tree}\['w'\]\[0\] is a"):
        polybridge.wrap(lambda params, *args: args, src="jax", dst="torch", **trees)


def test_weights_are_refused_where_there_are_no_modules():
    with pytest.raises(TypeError, match="takes params= only where dst= has modules, and numpy has none"):
        polybridge.wrap(lambda params, x: x, src="jax", dst="numpy", params={"w": jax.numpy.ones(2)})


@pytest.mark.parametrize("returned", [lambda x, state: x, lambda x, state: (x, x, state), lambda x, state: None])
def test_a_function_that_forgets_its_state_is_told_so(returned):
    params, state = {"w": jax.numpy.ones(2)}, {"n": jax.numpy.zeros(())}
    f = polybridge.wrap(lambda p, s, x: returned(x, s), src="jax", dst="torch", params=params, state=state)
    with pytest.raises(polybridge.OutputError, match=r"it is to return `\(out, state\)`"):
        f(torch.ones(2))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_apply_without_state_says_what_it_takes(mode):
    apply, params, _ = polybridge.wrap(torch.nn.Linear(2, 2), dst="jax")
    with pytest.raises(polybridge.WeightsError, match=r"takes `\(params, state, \*args\)`.*but state is a jax"):
        mode(lambda params, x: apply(params, x))(params, jax.numpy.ones(2))


def test_a_linen_module_without_variables_is_told_what_to_wrap():
    with pytest.raises(polybridge.UnsupportedModuleError, match=r"module\.apply, src=.*params="):
        polybridge.wrap(linen.Dense(2), dst="torch")
    module, x = linen.Dense(2), jax.numpy.ones((1, 3))
    variables = module.init(jax.random.key(0), x)
    f = polybridge.wrap(module.bind(variables), src="jax", dst="torch")
    np.testing.assert_allclose(f(torch.ones(1, 3)), module.apply(variables, x), rtol=1e-6)


OTHER_KERAS = """
import keras, numpy as np, torch, polybridge
for wrap in (lambda: polybridge.wrap(keras.layers.Dense(2), dst="torch"),
             lambda: polybridge.wrap(keras.Sequential([keras.layers.Dense(2)]), dst="jax"),
             lambda: polybridge.wrap(torch.nn.Linear(2, 2), dst="keras")):
    try:
        print(wrap())
    except polybridge.UnsupportedModuleError as error:
        assert "KERAS_BACKEND" in str(error), error
polybridge.wrap(torch.nn.Linear(2, 2), dst="jax").params["weight"]  # has nothing to do with Keras
print("done")
"""


@pytest.mark.parametrize("runs_on", ["torch", "jax"])
def test_keras_on_another_framework_is_told_what_to_set(runs_on):
    environment = {**os.environ, "KERAS_BACKEND": runs_on}
    run = subprocess.run(
        [sys.executable, "-c", OTHER_KERAS], env=environment, capture_output=True, text=True, timeout=100
    )
    assert run.stdout.split() == ["done"], run.stdout + run.stderr


def test_a_symbolic_tensor_of_keras_is_told_of_lambda():
    f = in_tf(torch.sin)
    with pytest.raises(
        polybridge.UnsupportedTensorError, match=r"args\[0\].*KerasTensor.*`keras\.layers\.Lambda\(f\)`"
    ):
        f(keras.Input((3,)))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(f)])
    np.testing.assert_allclose(model.predict(np.ones((2, 3)), verbose=0), np.sin(np.ones((2, 3))), rtol=1e-6)


class Scaling:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)

    def method(self, x):
        return self.layer(x)


def applied(layer, x, *, scale=2.0):
    return layer(x) * scale


REACHING = {
    "closure": lambda layer: lambda x: layer(x),
    "default": lambda layer: lambda x, layer=layer: layer(x),
    "partial": lambda layer: functools.partial(lambda x, layer: layer(x), layer=layer),
    "partial_of_partial": lambda layer: functools.partial(functools.partial(applied, layer), scale=3.0),
    "object": Scaling,
    "method": lambda layer: Scaling(layer).method,
    "own_method": lambda layer: layer.__call__,
    "beside_classes": lambda layer: lambda x: (torch.nn.Linear, Dense, layer(x))[2],
}


@pytest.mark.parametrize("make", REACHING.values(), ids=REACHING)
def test_weights_are_named_however_a_function_reaches_them(make):
    f, x = in_tf(make(torch.nn.Linear(3, 3))), tf.Variable(tf.ones((1, 3)))
    with (
        pytest.warns(DetachedStateWarning, match=r"wrapped function: (self|[\w.]*layer)\.weight, "),
        tf.GradientTape(),
    ):
        f(x)


@pytest.mark.parametrize("make", REACHING.values(), ids=REACHING)
@pytest.mark.parametrize("dst", ["torch", "jax"])
def test_frozen_weights_are_known_however_a_function_reaches_them(make, dst):
    layer = keras.layers.Dense(3, trainable=False)
    layer.build((1, 3))
    x = torch.ones(1, 3, requires_grad=True) if dst == "torch" else jax.numpy.ones((1, 3))
    f = polybridge.wrap(make(layer), src="tf", dst=dst)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DetachedStateWarning)
        f(x) if dst == "torch" else jax.vjp(f, x)


# Functions that were wrapped before.


@pytest.mark.parametrize("wrong", ["tf", "numpy"])
@pytest.mark.parametrize("dst", ["jax", "tf", "torch"])
def test_a_wrong_src_of_what_was_wrapped_before_is_told_at_once(wrong, dst):
    f = polybridge.wrap(tf.sin, src="tf", dst="torch")
    with pytest.raises(polybridge.WrongFrameworkError, match=r"src='\w+', but `sin`.* is a function of torch"):
        polybridge.wrap(f, src=wrong, dst=dst)


@pytest.mark.parametrize("options", [{}, {"src": "torch"}], ids=["alone", "with_src"])
def test_what_was_wrapped_before_shows_its_framework(options):
    f = polybridge.wrap(tf.sin, src="tf", dst="torch")
    again = polybridge.wrap(f, dst="jax", **options)
    x = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.jacobian(again)(x), jnp.diag(jnp.cos(x)), rtol=1e-6)
    assert polybridge.wrap(f, dst="torch", **options) is f


def test_what_is_made_of_a_wrapped_function_is_another():
    inner = polybridge.wrap(tf.sin, src="tf", dst="torch")

    @functools.wraps(inner)
    def outer(x):
        return polybridge.convert(inner(polybridge.convert(x, "torch")), "jax")

    found = polybridge.wrap(outer, src="jax", dst="numpy", vjp="finite-difference")(np.ones(2, np.float32))
    np.testing.assert_allclose(found, np.sin(np.ones(2)), rtol=1e-6)
    with pytest.raises(TypeError, match="needs src="):
        polybridge.wrap(outer, dst="numpy")
