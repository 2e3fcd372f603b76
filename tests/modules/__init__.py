"""Modules with weights and state on the other side."""
