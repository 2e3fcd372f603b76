"""The pairs of frameworks that the tests of this folder run over."""

from types import SimpleNamespace

import pytest

import polybridge
from tests.plugins.frameworks import FRAMEWORKS, PAIRS


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}->{pair[1]}")
def pair(request):
    """Two frameworks, and `wrap` from the one to the other."""
    src, dst = (FRAMEWORKS[name] for name in request.param)

    def wrap(fn=None, **options):
        return polybridge.wrap(fn, src=src.name, dst=dst.name, **options)

    return SimpleNamespace(src=src, dst=dst, wrap=wrap)
