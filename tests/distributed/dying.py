"""A program of `examples/distributed`, in a process that dies in the model's second call.

python -m tests.distributed.dying raise|kill VICTIM PROGRAM ARGUMENTS...
"""

import importlib
import os
import signal
import sys


def main(way: str, victim: str, program: str, *arguments: str) -> None:
    number = os.environ.get("RANK") or arguments[-1]
    if number == victim:
        name = "keras_net" if program.startswith("torch") else "torch_net"
        net = importlib.import_module(f"examples.distributed.{name}")
        original = net.network
        net.network = lambda: dying(original(), way, name)
    module = importlib.import_module(f"examples.distributed.{program}")
    if program == "jax_processes":
        module.PATIENCE = 10
    if program == "tf_workers":
        module.main(*arguments[:-1], number=int(arguments[-1]))
    else:
        module.main(*arguments[:-1], *map(int, arguments[-1:]))


def dying(model, way: str, name: str):
    calls = []

    def die(*_):
        calls.append(1)
        if len(calls) < 3:  # the first may be those that find shapes
            return
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the model dies here")

    if name == "torch_net":
        model.register_forward_pre_hook(die)
    else:
        model.run_eagerly = True
        call = model.call
        model.call = lambda x, **options: (die(), call(x, **options))[1]
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
