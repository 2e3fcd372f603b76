"""Measures polybridge against the native function and against the smallest hand-written DLPack bridge."""

import os

os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "3"
)  # TensorFlow reads it once, at import, in our modules and subprocesses
