"""Many functions of each framework, under the derivative checkers of the others."""
