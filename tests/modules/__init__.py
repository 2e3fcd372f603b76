"""Modules of one framework as those of another."""
