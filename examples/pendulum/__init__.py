"""A driven, damped pendulum: its simulator is written in JAX, its parameters are learnt by PyTorch.

    python -m examples.pendulum            # 16 random starts, about twenty seconds on two cores
    python -m examples.pendulum --quick    # 4 of them

PyTorch's optimiser sees an ordinary differentiable function: noisy angles go in, each parameter comes out within 1 %.

    simulator.py    the equation of motion, integrated in JAX
    data.py         the true parameters, and what a camera with noise would have seen of them
    training.py     the PyTorch module, the loss, the loop
    report.py       the table, the figure, the numbers
"""
