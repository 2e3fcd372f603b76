"""The plugin of the toy backend; imports toy only when the backend is loaded."""

import polybridge


@polybridge.hookimpl
def polybridge_backends() -> list[polybridge.BackendPlugin]:
    """Offer toy."""
    return [polybridge.BackendPlugin("toy", _load, module="toy", requirement="polybridge-toy")]


def _load() -> polybridge.Backend:
    from polybridge_toy.backend import ToyBackend

    return ToyBackend()
