"""Asks for NumPy in both roles, and for derivatives that the caller of `wrap` gives, over every framework."""
