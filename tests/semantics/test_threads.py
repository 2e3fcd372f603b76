"""Asks that threads, nesting and new processes give the right result or a clear error, and never a hang."""

import subprocess
import sys

import pytest

from tests.semantics import processes
from tests.semantics.scenarios import SCENARIOS


@pytest.fixture(scope="module", params=[0, 1], ids=["pool of the machine's size", "pool of one"])
def outcomes(request):
    """Return how each scenario ended, with TensorFlow's inter-op pool at its default and at one thread."""
    command = [sys.executable, "-m", "tests.semantics.scenarios", str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=processes.ROOT)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines()) | {"the last words": done.stderr[-3000:]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcomes, name):
    assert outcomes.get(name, outcomes["the last words"]) == "ok"


# Processes.


def test_a_forked_child_gets_an_error_at_once():
    text = processes.run(
        """
        import os, time, torch, tensorflow as tf, polybridge
        f = polybridge.wrap(tf.square, src="tf", dst="torch")
        g = polybridge.wrap(lambda x: x * x, src="torch", dst="tf")
        x, y = torch.ones(2, requires_grad=True), tf.ones(2)
        f(x).sum().backward(), g(y)
        started = time.monotonic()
        if (child := os.fork()) == 0:
            for call in (lambda: f(x), lambda: f(torch.ones(2)), lambda: g(y)):
                try:
                    call()
                    os._exit(1)
                except polybridge.ForkError as error:
                    assert "spawn" in str(error) and "tensorflow" in str(error), error
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), time.monotonic() - started < 10)
        """
    )
    assert text == "0 True\n"


def test_a_backward_in_a_forked_child_gets_an_error_at_once():
    text = processes.run(
        """
        import os, torch, tensorflow as tf, polybridge
        y = polybridge.wrap(tf.square, src="tf", dst="torch")(torch.ones(2, requires_grad=True)).sum()
        if (child := os.fork()) == 0:
            try:
                y.backward()
            except polybridge.ForkError:
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert text == "7\n"


def test_a_graph_in_a_forked_child_is_an_error_while_it_is_traced():
    text = processes.run(
        """
        import os, torch, tensorflow as tf, polybridge
        g = polybridge.wrap(lambda x: x * x, src="torch", dst="tf")
        g(tf.ones(2))
        if (child := os.fork()) == 0:
            try:
                with tf.Graph().as_default():
                    g(tf.compat.v1.placeholder(tf.float32, [2]))
            except polybridge.ForkError:
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert text == "7\n"


def test_the_parent_goes_on_after_a_fork():
    text = processes.run(
        """
        import os, torch, tensorflow as tf, polybridge
        f = polybridge.wrap(tf.square, src="tf", dst="torch")
        f(torch.ones(2))
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print(f(torch.tensor(3.0)).item())
        """
    )
    assert text == "9.0\n"


def test_a_child_forked_before_anything_has_run_may_use_it():
    text = processes.run(
        """
        import os, torch, tensorflow as tf, polybridge
        f = polybridge.wrap(lambda x: x * x, src="tf", dst="torch")
        if (child := os.fork()) == 0:
            os._exit(int(f(torch.tensor(3.0)).item()))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert text == "9\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_another_start_method_works(method):
    text = processes.run(
        f"""
        import multiprocessing
        from tests.semantics.processes import squares_in_torch
        squares_in_torch([1.0])
        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(1) as pool:
                print(pool.apply(squares_in_torch, ([2.0, 3.0],)))
        """,
        seconds=90,
    )
    assert text == "[4.0, 9.0]\n"


def test_a_forking_data_loader_says_what_to_do():
    text = processes.run(
        """
        import torch, polybridge
        from tests.semantics.processes import Squares, squares_in_torch
        squares_in_torch([1.0])
        loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
        try:
            list(loader)
        except polybridge.ForkError as error:
            print("spawn" in str(error))
        """
    )
    assert text == "True\n"


def test_a_forking_data_loader_works_where_nothing_had_started():
    text = processes.run(
        """
        import torch
        from tests.semantics.processes import Squares
        loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="fork")
        print([batch.item() for batch in loader])
        """
    )
    assert text == "[0.0, 1.0, 4.0, 9.0]\n"


def test_a_spawning_data_loader_works():
    text = processes.run(
        """
        import torch
        from tests.semantics.processes import Squares, squares_in_torch
        if __name__ == "__main__":
            squares_in_torch([1.0])
            loader = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context="spawn")
            print([batch.item() for batch in loader])
        """,
        seconds=90,
    )
    assert text == "[0.0, 1.0, 4.0, 9.0]\n"


def test_the_process_ends_while_a_daemon_thread_is_in_a_call():
    text = processes.run(
        """
        import threading, torch, tensorflow as tf, polybridge
        f = tf.function(polybridge.wrap(lambda x: x * x, src="torch", dst="tf"))
        f(tf.ones(3))
        entered = threading.Event()

        def forever():
            while True:
                f(tf.ones(3))
                entered.set()

        threading.Thread(target=forever, daemon=True).start()
        entered.wait()
        print("done", flush=True)
        import os
        os._exit(0)
        """
    )
    assert text == "done\n"


@pytest.mark.parametrize("start", ["", "tf.constant(0)"], ids=["from the start", "from then on"])
def test_tensorflow_may_execute_asynchronously(start):
    text = processes.run(
        f"""
        import jax, jax.numpy as jnp, numpy as np, tensorflow as tf, torch
        import polybridge

        def square(x):
            return tf.square(x) + 0 * tf.sin(x)

        {start}
        tf.config.experimental.set_synchronous_execution(False)
        in_torch = polybridge.wrap(square, src="tf", dst="torch")
        in_jax = jax.grad(lambda x, f=polybridge.wrap(square, src="tf", dst="jax"): f(x).sum())
        in_numpy = polybridge.wrap(lambda x: tf.reduce_sum(square(x)), src="tf", dst="numpy")
        in_tf = polybridge.wrap(torch.square, src="torch", dst="tf")
        for _ in range(200):
            x = torch.ones(1000, requires_grad=True)
            in_torch(x).sum().backward()
            assert x.grad.eq(2).all()
            assert torch.func.grad(lambda x: in_torch(x).sum())(torch.ones(3)).eq(2).all()
            assert (in_jax(jnp.ones(1000)) == 2).all()
            assert (in_numpy.value_and_grad(np.ones(1000))[1] == 2).all()
            with tf.GradientTape() as tape:
                x = tf.Variable(tf.ones(1000))
                y = in_tf(x)
            assert (tape.gradient(y, x).numpy() == 2).all()
        print("done")
        """
    )
    assert text == "done\n"
