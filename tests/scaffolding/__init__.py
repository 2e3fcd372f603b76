"""Tests of what holds the repository together: layering, imports, packaging."""
