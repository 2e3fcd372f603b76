"""What TensorFlow and Keras make of a list or dict that is assigned to a module, as what it stands for."""

from __future__ import annotations

import keras
import tensorflow as tf

from polybridge.core.trees import register_like


def register() -> None:
    """Teach polybridge's trees these classes, which have no public names: each is found as a module makes it."""
    for module in (tf.Module(name="trees"), keras.layers.Layer(name="trees")):
        module.list, module.dict, module.tuple = [], {}, (tf.Module(name="trees"),)
        for made, plain in ((module.list, list), (module.dict, dict), (module.tuple, tuple)):
            if type(made) is not plain:
                register_like(type(made), plain)
