"""Asks that a function of either framework is a native one of the other: values, derivatives, dtypes, structures."""

import threading

import numpy as np
import pytest

import polybridge

X = [0.5, 1.5]


def close(x, expected, pair):
    """Assert that a tensor of the destination holds these numbers."""
    np.testing.assert_allclose(pair.dst.numpy(x), expected, rtol=1e-6)


def test_the_value(pair):
    f = pair.wrap(lambda x: pair.src.sin(x) * x)
    close(f(pair.dst.tensor(X)), np.sin(X) * X, pair)


def test_the_gradient(pair):
    f = pair.wrap(lambda x: pair.src.sin(x) * x)
    close(pair.dst.derivative(f)(pair.dst.tensor(X)), np.cos(X) * X + np.sin(X), pair)


@pytest.mark.parametrize(("order", "factor"), [(1, 5), (2, 20), (3, 60), (4, 120)])
def test_derivatives_of_higher_order(pair, order, factor):
    f = pair.dst.derivative(pair.wrap(lambda x: x**5), order)
    close(f(pair.dst.tensor(X)), factor * np.array(X) ** (5 - order), pair)


def test_the_third_derivative_when_another_input_has_no_influence(pair):
    f = pair.wrap(lambda x, w: x**5)
    third = pair.dst.derivative(lambda x: f(x, x * 2), 3)
    close(third(pair.dst.tensor(X)), 60 * np.array(X) ** 2, pair)


def test_derivatives_flow_through_native_operations_around_the_call(pair):
    """Of sin(f(3 x)) with f(x) = x**2: 18 x cos(9 x**2), and again."""
    f, x = pair.wrap(lambda x: x**2), np.array(X)
    first, second = (pair.dst.derivative(lambda x: pair.dst.sin(f(x * 3.0)), order) for order in (1, 2))
    close(first(pair.dst.tensor(X)), 18 * x * np.cos(9 * x**2), pair)
    close(second(pair.dst.tensor(X)), 18 * np.cos(9 * x**2) - 324 * x**2 * np.sin(9 * x**2), pair)


def test_derivatives_flow_through_two_calls_in_a_row(pair):
    square = pair.wrap(lambda x: x**2)
    second = pair.dst.derivative(lambda x: square(square(x)), 2)
    close(second(pair.dst.tensor(X)), 12 * np.array(X) ** 2, pair)


def test_two_inputs_have_a_gradient_each(pair):
    f = pair.wrap(lambda x, w: x * w**2)
    x, w, one = pair.dst.tensor(2.0), pair.dst.tensor(3.0), pair.dst.tensor(1.0)
    by_x, by_w = pair.dst.pull(lambda x, w: [f(x, w)], [x, w], [one])
    close(by_x, 9.0, pair)
    close(by_w, 12.0, pair)


def test_the_same_tensor_twice_gets_the_sum(pair):
    f = pair.wrap(lambda x, w: x * w**2)
    close(pair.dst.derivative(lambda x: f(x, x))(pair.dst.tensor(X)), 3 * np.array(X) ** 2, pair)


def test_an_unused_input_has_no_gradient(pair):
    f = pair.wrap(lambda x, w: x * 3)
    x, w, one = pair.dst.tensor(2.0), pair.dst.tensor(3.0), pair.dst.tensor(1.0)
    by_x, by_w = pair.dst.pull(lambda x, w: [f(x, w)], [x, w], [one])
    close(by_x, 3.0, pair)
    assert by_w is None


def test_an_integer_input_passes_through_without_a_gradient(pair):
    f = pair.wrap(lambda x, n: x[int(pair.src.numpy(n))] * 2)
    x, n, one = pair.dst.tensor(X), pair.dst.tensor(1, "int64"), pair.dst.tensor(1.0)
    by_x, by_n = pair.dst.pull(lambda x, n: [f(x, n)], [x, n], [one])
    close(by_x, [0.0, 2.0], pair)
    assert by_n is None


def test_several_outputs_take_a_cotangent_each(pair):
    f = pair.wrap(lambda x: (x**2, x**3))
    x, a, b = pair.dst.tensor(2.0), pair.dst.tensor(10.0), pair.dst.tensor(1.0)
    close(pair.dst.pull(f, [x], [a, b])[0], 52.0, pair)


def test_an_output_without_a_cotangent_counts_as_zero(pair):
    f = pair.wrap(lambda x: (x**2, x**3))
    close(pair.dst.pull(f, [pair.dst.tensor(2.0)], [None, pair.dst.tensor(1.0)])[0], 12.0, pair)


def test_an_integer_output_stands_beside_a_differentiable_one(pair):
    f = pair.wrap(lambda x: (x**2, pair.src.tensor([7], "int64")))
    _, seven = f(pair.dst.tensor(2.0))
    assert pair.dst.numpy(seven).tolist() == [7]
    assert pair.dst.numpy(seven).dtype == np.int64
    close(pair.dst.pull(f, [pair.dst.tensor(2.0)], [pair.dst.tensor(1.0), None])[0], 4.0, pair)


def test_an_output_may_be_the_input(pair):
    f = pair.wrap(lambda x: x)
    close(f(pair.dst.tensor(X)), X, pair)
    close(pair.dst.derivative(f)(pair.dst.tensor(X)), [1.0, 1.0], pair)


def test_arguments_and_results_keep_their_structure(pair):
    f = pair.wrap(lambda p, scale: {"loss": p["x"] * p["w"][0] * scale, "name": "linear"})
    result = f({"x": pair.dst.tensor(2.0), "w": [pair.dst.tensor(3.0)]}, scale=10)
    close(result["loss"], 60.0, pair)
    assert result["name"] == "linear"


def test_a_numpy_argument_is_a_constant(pair):
    f = pair.wrap(lambda x, c: x * c)
    close(pair.dst.derivative(lambda x: f(x, np.array([10.0, 20.0])))(pair.dst.tensor(X)), [10.0, 20.0], pair)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_dtypes_stay_in_value_and_gradient(pair, dtype):
    f = pair.wrap(lambda x: x * x)
    x = pair.dst.tensor(3.0, dtype)
    assert pair.dst.numpy(f(x)).dtype.name == dtype
    (by_x,) = pair.dst.pull(lambda x: [f(x)], [x], [pair.dst.tensor(1.0, dtype)])
    assert pair.dst.numpy(by_x).dtype.name == dtype
    assert pair.dst.numpy(by_x) == 6.0


def test_bfloat16_crosses(pair):
    f = pair.wrap(lambda x: x * x)
    assert polybridge.convert(f(pair.dst.tensor(3.0, "bfloat16")), to="toy").value.dtype.name == "bfloat16"


def test_complex_cotangents_follow_the_conjugate_convention(pair):
    """Of y = z**2 at 1 + 2j with a cotangent of 1: conj(2 z) is 2 - 4j, as in torch and TensorFlow."""
    f = pair.wrap(lambda z: z * z)
    z, one = pair.dst.tensor(1 + 2j, "complex128"), pair.dst.tensor(1 + 0j, "complex128")
    (by_z,) = pair.dst.pull(lambda z: [f(z)], [z], [one])
    assert pair.dst.numpy(by_z) == 2 - 4j


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 3, 1), (2, 0, 3)], ids=str)
def test_shapes_stay_in_value_and_gradient(pair, shape):
    f = pair.wrap(lambda x: x * x)
    x = pair.dst.tensor(np.full(shape, 3.0))
    assert pair.dst.numpy(f(x)).shape == shape
    assert pair.dst.numpy(pair.dst.derivative(f)(x)).shape == shape


def test_the_function_runs_once_for_a_value_and_a_gradient(pair):
    calls = []
    f = pair.wrap(lambda x: calls.append("run") or x * x)
    derivative = pair.dst.derivative(f)
    derivative(pair.dst.tensor(X))  # traces, where the destination does
    calls.clear()
    derivative(pair.dst.tensor(X))
    assert calls == ["run"]


def test_the_functions_exception_keeps_its_type(pair):
    class Own(Exception):
        pass

    def fail(x):
        raise Own("mine")

    with pytest.raises(Own, match="mine"):
        pair.wrap(fail)(pair.dst.tensor(X))


def test_a_tensor_of_the_source_is_refused(pair):
    f = pair.wrap(lambda x: x)
    with pytest.raises(polybridge.WrongFrameworkError, match=rf"takes {pair.dst.name} tensors, but args\[0\]"):
        f(pair.src.tensor(X))


def test_a_call_may_go_there_and_back(pair):
    """The destination's function calls the source's, which calls the destination's again."""
    inner = polybridge.wrap(lambda x: pair.dst.sin(x), src=pair.dst.name, dst=pair.src.name)
    f = pair.wrap(lambda x: inner(x) * x)
    close(f(pair.dst.tensor(X)), np.sin(X) * X, pair)


def test_a_gradient_may_go_there_and_back(pair):
    inner = polybridge.wrap(lambda x: pair.dst.sin(x), src=pair.dst.name, dst=pair.src.name)
    f = pair.wrap(lambda x: inner(x) * x)
    first, second = (pair.dst.derivative(f, order) for order in (1, 2))
    close(first(pair.dst.tensor(X)), np.cos(X) * X + np.sin(X), pair)
    close(second(pair.dst.tensor(X)), 2 * np.cos(X) - np.sin(X) * X, pair)


def test_threads_differentiate_one_function_at_once(pair):
    derivative, found = pair.dst.derivative(pair.wrap(lambda x: x**3)), {}

    def differentiate(n):
        found[n] = [float(pair.dst.numpy(derivative(pair.dst.tensor(float(n))))) for _ in range(5)]

    threads = [threading.Thread(target=differentiate, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [3.0 * n**2] * 5 for n in range(4)}


def test_every_move_is_one_copy_where_a_side_has_no_dlpack(pair):
    f, x = pair.wrap(lambda x: x * x), pair.dst.tensor(X)
    f(x), f(x)  # a torch function may write to its inputs until it has shown that it does not
    with polybridge.observe.count_crossings() as counts:
        f(x)
    assert (counts.crossings, counts.copies, counts.bytes_copied) == (2, 2, 32)


def test_a_function_may_write_to_its_inputs_which_are_copies():
    import toy

    f, x = polybridge.wrap(lambda x: x.add_(1.0) * x, src="torch", dst="toy"), toy.array([2.0])
    assert f(x).value.tolist() == [9.0]
    assert toy.grad(lambda x: f(x).sum())(x).value.tolist() == [6.0]
    assert x.value.tolist() == [2.0]
