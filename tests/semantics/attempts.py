"""Runs scenarios that could hang, each in a thread of its own and for some seconds."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Mapping

import tensorflow as tf


def attempt(work: Callable[[], object], seconds: float) -> str:
    """Run one scenario and say how it ended; of one that hangs, the stacks of all threads go to the standard error."""
    outcome = ["hang"]

    def working() -> None:
        try:
            work()
            outcome[0] = "ok"
        except BaseException as error:
            outcome[0] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]

    thread = threading.Thread(target=working, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome[0] == "hang":
        faulthandler.dump_traceback()
    return outcome[0]


def main(scenarios: Mapping[str, Callable[[], object]], seconds: float) -> None:
    """Run the scenarios of the command line, `INTER_OP_THREADS NAME...`, and end the process."""
    tf.config.threading.set_inter_op_parallelism_threads(int(sys.argv[1]))
    for name in sys.argv[2:] or scenarios:
        print(f"{name}: {attempt(scenarios[name], seconds)}", flush=True)
    os._exit(0)  # threads that hang would not let this process end
