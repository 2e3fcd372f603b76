"""Tests of torch as the destination: its function transforms, compiler, checkpoints and saved-tensor hooks."""
