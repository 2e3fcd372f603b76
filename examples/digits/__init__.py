"""Handwritten digits, learnt by one network whose two halves live in two frameworks.

    python -m examples.digits            # both directions, about half a minute on two cores
    python -m examples.digits --quick    # the equality check and a few epochs

Run 1 puts a Keras extractor under a PyTorch head and trains both in a PyTorch loop; run 2 is the mirror.
Beside each runs its native twin: the same network, weights and batches in one framework.

    data.py         the images, the split, the batches
    models.py       the network's two halves, in Keras and in PyTorch, from the same initial weights
    torch_loop.py   run 1 and its twin
    tf_loop.py      run 2 and its twin
    training.py     epochs, and what is measured on the way
    report.py       the table, the figure, the numbers
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a network this small only waits for PyTorch's second thread
