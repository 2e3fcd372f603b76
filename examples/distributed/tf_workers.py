"""A PyTorch module in TensorFlow's `MultiWorkerMirroredStrategy`, over two processes.

python -m examples.distributed.tf_workers localhost:12345 localhost:12346 0 &
python -m examples.distributed.tf_workers localhost:12345 localhost:12346 1
"""

import json
import os
import sys

import tensorflow as tf


def main(*workers: str, number: int) -> None:
    task_of_this = {"type": "worker", "index": number}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task_of_this})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before TensorFlow does anything else

    from examples.distributed import task, torch_net
    from examples.distributed.tf_mirrored import by_loop, dataset

    trained = by_loop(strategy, dataset())
    task.report("MultiWorkerMirroredStrategy", torch_net.weights(trained), torch_net.trained())


if __name__ == "__main__":
    main(*sys.argv[1:-1], number=int(sys.argv[-1]))
