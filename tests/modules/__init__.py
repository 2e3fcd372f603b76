"""Functions of one framework under the function transforms of another."""
