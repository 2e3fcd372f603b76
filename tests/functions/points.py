"""Points at which functions are differentiated, away from kinks and degeneracies."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def real(*shape: int) -> Array:
    """Return values away from 0, where many functions have a kink."""
    return RNG.uniform(0.2, 1.5, shape) * RNG.choice([-1, 1], shape)


def positive(*shape: int) -> Array:
    """Return values away from 0."""
    return RNG.uniform(0.3, 1.5, shape)


def unit(*shape: int) -> Array:
    """Return values between -1 and 1."""
    return RNG.uniform(-0.8, 0.8, shape)


def distinct(*shape: int) -> Array:
    """Return values that are well apart."""
    return RNG.permutation(np.prod(shape)).reshape(shape) * 0.7 - 1.1


def definite(n: int) -> Array:
    """Return a positive definite matrix with eigenvalues apart."""
    q, _ = np.linalg.qr(RNG.normal(size=(n, n)))
    return q @ np.diag(1.0 + np.arange(n)) @ q.T


def regular(n: int) -> Array:
    """Return an invertible matrix with singular values apart."""
    (p, _), (q, _) = np.linalg.qr(RNG.normal(size=(n, n))), np.linalg.qr(RNG.normal(size=(n, n)))
    return p @ np.diag(1.0 + np.arange(n)) @ q


def tall() -> Array:
    """Return a matrix of three rows and two columns with singular values apart."""
    return np.concatenate([regular(2), real(1, 2)])


def dominant(n: int) -> Array:
    """Return a matrix that is also invertible where one triangle of it is cut off."""
    return regular(n) + 3 * np.eye(n)


def complex_(*shape: int) -> Array:
    """Return complex values away from 0."""
    return real(*shape) + 1j * real(*shape)
