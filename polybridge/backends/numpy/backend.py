"""NumPy as a backend, delegating to its siblings."""

from __future__ import annotations

from polybridge.backends.numpy import convert, native, source
from polybridge.core.backend import Backend


class NumPyBackend(Backend):
    """NumPy writes in place, does not count its writes, and differentiates nothing.

    It has no DLPack here: NumPy's imports are read-only, its exports refuse read-only arrays, and both lack bfloat16.
    Memory changes hands where it is proved that nothing else refers to it; everything else that crosses is a copy.
    """

    name = "numpy"
    aliases = ("np",)
    writes = True
    derivatives = False

    is_tensor = staticmethod(convert.is_tensor)
    to_numpy = staticmethod(convert.dense)
    from_numpy = staticmethod(convert.from_numpy)
    vjp = staticmethod(source.vjp)
    wrap_as_native = staticmethod(native.wrap_as_native)
    decorate = staticmethod(native.decorate)
    spec = staticmethod(convert.spec)
    dtype_name = staticmethod(convert.dtype_name)
    adopt = staticmethod(convert.adopt)
    reference = staticmethod(convert.reference)
    owns = staticmethod(convert.owns)
    dense = staticmethod(convert.dense)
