"""Asks that a function of one framework is a native function of another, in eager mode, for every pair."""
