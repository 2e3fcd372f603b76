"""Tests of what a call means: residuals, per-thread state, threads and processes, memory."""
