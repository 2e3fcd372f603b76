"""Asks that wrapped functions work inside what the frameworks put around a function, or are refused by name."""

import pytest
import tensorflow as tf
import torch

import polybridge
from tests.semantics.calls import to_tf, with_gradient


class Squared(tf.Module):
    """Holds a bridged call."""

    def __init__(self):
        super().__init__()
        self.square = to_tf(torch.square)

    @tf.function
    def __call__(self, x):
        """Return the square."""
        return self.square(x)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_saved_model_is_refused_by_name(dtype, tmp_path, capfd):
    model = Squared()
    model(tf.ones([3], dtype))
    with pytest.raises(ValueError, match="SavedModel"):
        tf.saved_model.save(model, str(tmp_path))
    error = polybridge.last_error()
    assert isinstance(error, polybridge.CompilationError)
    for part in ("square (src='torch', dst='tensorflow')", "SavedModel", "save_weights"):
        assert part in str(error)


def test_a_gradient_in_vectorized_map_names_map_fn():
    f = to_tf(lambda x: x * x)
    with pytest.raises(Exception, match=r"tf\.map_fn"):
        tf.function(lambda x: tf.vectorized_map(lambda x: with_gradient(f, x)[1], x))(tf.ones([4, 2]))
    assert isinstance(polybridge.last_error(), polybridge.ResidualError)
