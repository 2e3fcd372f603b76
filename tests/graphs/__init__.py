"""Tests of wrapped functions inside TensorFlow graphs: `tf.function`, control flow, TF1 sessions."""
