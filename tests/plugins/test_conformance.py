"""Runs the conformance suite on toy and on the built-in backends."""

import numpy as np
import pytest

import polybridge
from polybridge.testing import LAWS, Example, Subject
from tests.plugins.frameworks import FRAMEWORKS

POINTS = [np.array([[0.5, 1.5], [-0.4, 0.3]]), np.array([[1.2, 0.7], [0.1, -0.9]]), np.array(0.8)]


def examples(framework):
    """Return functions with several inputs and outputs, of real and of complex numbers, in one framework's words."""

    def real(x, w, s):
        y = framework.sin(x @ w) * s + x[0]
        return y, framework.sum(y * y * y) / s

    def complex_(z, c):
        return framework.sin(z) * c + z * z / c

    points = [np.array([0.3 + 0.4j, -0.2 + 1j]), np.array(1.1 - 0.3j)]
    linear = Example(lambda x: x * 3.0, [np.array([1.0, 2.0])], "linear")
    return [Example(real, POINTS, "real"), Example(complex_, points, "complex"), linear]


SUBJECTS = {
    "toy": {},
    "torch": {"write": lambda x: x.add_(1)},
    "tensorflow": {},
    "jax": {},
    "numpy": {},
}


@pytest.fixture(params=SUBJECTS)
def subject(request):
    backend = polybridge.get_backend(request.param)
    given = examples(FRAMEWORKS[request.param]) if backend.derivatives else ()
    return Subject(backend, given, **SUBJECTS[request.param])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law(law, subject):
    law(subject)
