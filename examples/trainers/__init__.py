"""Trainers that were written for PyTorch, with a Keras model in PyTorch's place."""
