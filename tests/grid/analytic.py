"""The function of the grid, x**3 sin(x) sum(x), and its derivatives on paper.

It mixes its elements, so that a batch along a wrong axis, a transposed Jacobian or a diagonal Hessian shows.
"""

from __future__ import annotations

import numpy as np

X = np.array([0.5, -1.25, 2.0])
TANGENT = np.array([1.0, -0.5, 0.25])
BATCH = np.array([[0.5, -1.25, 2.0], [1.0, 0.75, -0.5], [-2.0, 1.5, 0.25], [0.1, 0.2, 0.3]])


def value(x: np.ndarray) -> np.ndarray:
    """Return the function itself."""
    return x**3 * np.sin(x) * np.sum(x)


def jacobian(x: np.ndarray) -> np.ndarray:
    """Return the derivative of each result, a row, in each element."""
    slope = 3 * x**2 * np.sin(x) + x**3 * np.cos(x)
    return np.diag(slope * x.sum()) + (x**3 * np.sin(x))[:, None]


def hessian(x: np.ndarray) -> np.ndarray:
    """Return the second derivatives of the sum of the results."""
    slope = 3 * x**2 * np.sin(x) + x**3 * np.cos(x)
    bend = 6 * x * np.sin(x) + 6 * x**2 * np.cos(x) - x**3 * np.sin(x)
    return np.diag(bend * x.sum()) + slope[:, None] + slope


EXPECTED = {
    "value": value(X),
    "first": jacobian(X).sum(0),  # the gradient of the sum
    "second": hessian(X).sum(0),  # the gradient of the sum of the gradient
    "jvp": jacobian(X) @ TANGENT,
    "vmap": np.stack([value(x) for x in BATCH]),
    "jacobian": jacobian(X),
    "hessian": hessian(X),
}
