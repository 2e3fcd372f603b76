"""Looks at what crosses between frameworks."""

from polybridge.core.exchange import Crossings, count_crossings

__all__ = ["Crossings", "count_crossings"]
