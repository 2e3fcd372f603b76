"""Asks that a process ends well while threads of a framework still call a wrapped function."""

import pytest

from tests.semantics.processes import run

PIPELINE = """
    import jax.numpy as jnp, numpy as np, tensorflow as tf, torch
    import polybridge

    f = polybridge.wrap(lambda x: {library}.sin(x) * x, src="{src}", dst="tf")

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    data = tf.data.Dataset.from_tensors(tf.ones(200_000)).repeat()
    batches = iter(data.map({mapped}, num_parallel_calls=2).prefetch(8))  # whose buffers fill in the background
    next(batches)
    print("ends")
"""


@pytest.mark.parametrize(
    ("src", "library", "mapped"), [("torch", "torch", "gradient"), ("jax", "jnp", "gradient"), ("numpy", "np", "f")]
)
def test_a_pipeline_of_tensorflow_that_nobody_reads_any_more(src, library, mapped):
    assert run(PIPELINE.format(src=src, library=library, mapped=mapped)) == "ends\n"


def test_a_thread_that_calls_a_graph_for_ever():
    text = run("""
        import threading
        import tensorflow as tf, torch
        import polybridge

        graph = tf.function(polybridge.wrap(lambda x: torch.sin(x) * x, src="torch", dst="tf"))
        graph(tf.ones(200_000))
        begun = threading.Event()

        def calls():
            while True:
                graph(tf.ones(200_000))
                begun.set()

        threading.Thread(target=calls, daemon=True).start()
        begun.wait()
        print("ends")
    """)
    assert text == "ends\n"


def test_what_still_asks_for_a_result_is_told():
    text = run("""
        import atexit
        import tensorflow as tf, torch
        import polybridge

        def last():
            try:
                graph(tf.ones(3))
            except tf.errors.OutOfRangeError as error:
                print(error.message)
            print(f(tf.ones(3)).numpy())  # which no thread of TensorFlow calls

        atexit.register(last)
        f = polybridge.wrap(lambda x: x + 1, src="torch", dst="tf")
        graph = tf.function(f)
        graph(tf.ones(3))
    """)
    assert "src='torch', dst='tensorflow'): Python is ending, and graphs cannot call its functions any more" in text
    assert text.endswith("[2. 2. 2.]\n")


def test_jax_computes_what_was_asked_for():
    text = run("""
        import jax, jax.numpy as jnp, torch
        import polybridge

        f = polybridge.wrap(lambda x: torch.sin(x) * x, src="torch", dst="jax")
        graph = jax.jit(lambda x: f(f(f(x))))
        graph(jnp.ones(1_000_000)).block_until_ready()
        for _ in range(4):
            graph(jnp.ones(1_000_000))
        print("ends")
    """)
    assert text == "ends\n"


LEFT_OVER = """
    {imports}
    import polybridge

    f = polybridge.wrap(lambda x: {function}(x), src="{src}", dst="{dst}")
    x = {x}

    class Left:
        def __init__(self):
            self.me = self  # so that Python finds it when all else is gone

        def __del__(self):
            try:
                {call}
            except polybridge.EndingError as error:
                print(error)

    {call}
    Left()
    print("ends")
"""


@pytest.mark.parametrize(
    ("src", "function", "dst", "imports", "x", "call"),
    [
        ("torch", "torch.sin", "numpy", "import numpy as np, torch", "np.ones(2)", "f.vjp(x)[1](x)"),
        ("tf", "tf.sin", "torch", "import tensorflow as tf, torch", "torch.ones(2, requires_grad=True)", "f(x)"),
        ("jax", "jnp.sin", "numpy", "import jax.numpy as jnp, numpy as np", "np.ones(2, np.float32)", "f(x)"),
        ("numpy", "np.sin", "jax", "import jax.numpy as jnp, numpy as np", "jnp.ones(2)", "f(x)"),
    ],
    ids=["torch-numpy", "tf-torch", "jax-numpy", "numpy-jax"],
)
def test_a_finalizer_that_calls_when_python_ends_is_told(src, function, dst, imports, x, call):
    """torch would abort the process, and JAX hang."""
    text = run(LEFT_OVER.format(src=src, function=function, dst=dst, imports=imports, x=x, call=call), seconds=40)
    first, second, *more = text.splitlines()
    assert (first, more) == ("ends", [])
    assert "was called when Python was ending, by the `__del__` of an object that was left over" in second


def test_handlers_of_atexit_call_to_the_last():
    text = run("""
        import atexit

        atexit.register(lambda: print(f(torch.ones(2)).tolist()))  # the first of all, hence the last to run
        import numpy as np, torch
        import polybridge

        f = polybridge.wrap(np.negative, src="numpy", dst="torch")
        print("ends")
    """)
    assert text == "ends\n[-1.0, -1.0]\n"
