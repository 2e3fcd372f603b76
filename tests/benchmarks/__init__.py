"""Tests of the benchmarks: that they are honest and that they run."""
