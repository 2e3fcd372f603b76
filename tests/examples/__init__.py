"""The programs in `examples/` do what they promise."""
