"""TensorFlow tensors in and out: dtypes, DLPack, NumPy. TensorFlow's own tensors are dense and aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from polybridge.backends.tensorflow import _private
from polybridge.core.errors import UnsupportedTensorError
from polybridge.core.specs import DIFFERENTIABLE, SUPPORTED, TensorSpec

EagerTensor = tf.__internal__.EagerTensor  # not `type(tf.constant(0))`, which would start the runtime
ALIGNMENT = 64  # bytes; Eigen's EIGEN_MAX_ALIGN_BYTES in TensorFlow's builds: a CHECK aborts on less

from_dlpack = tf.experimental.dlpack.from_dlpack


_NAMES: dict[tf.DType, str] = {tf.as_dtype(name): name for name in SUPPORTED}


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a variable of TensorFlow or Keras that converts to one."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return True
    return hasattr(type(value), "__tf_tensor__") and type(value).__name__ != "KerasTensor"


def is_composite(value: Any) -> bool:
    """Whether it is sparse, ragged or otherwise composed, or symbolic in Keras."""
    return isinstance(value, (tf.__internal__.CompositeTensor, tf.TensorArray)) or type(value).__name__ == "KerasTensor"


def advice(value: Any) -> str:
    """Say how a functional model of Keras calls a function."""
    if type(value).__name__ != "KerasTensor":
        return ""
    return "A functional model calls layers: make one of the function, `keras.layers.Lambda(f)`, or wrap a module"


def spec(tensor: Any) -> TensorSpec:
    """Return shape, with None for what is unknown in a graph, and dtype."""
    shape = tensor.shape
    dims = None if shape.rank is None else tuple(shape.as_list())
    return TensorSpec(dims, dtype_name(tensor))


def dtype_name(tensor: Any) -> str:
    """Return the NumPy name of the dtype.

    Raises:
        UnsupportedTensorError: strings, resources, variants, float8 and quantised dtypes.
    """
    dtype = tensor.dtype
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    if not isinstance(dtype, tf.DType):  # Keras variables have strings
        dtype = tf.as_dtype(dtype)
    name: str = dtype.base_dtype.name  # a reference variable of TensorFlow 1 has a dtype of its own
    if name not in SUPPORTED:
        raise UnsupportedTensorError(f"a tensor of dtype {name}")
    return name


def is_differentiable(tensor: Any) -> bool:
    """Whether it is floating or complex.

    Raises:
        UnsupportedTensorError: as `dtype_name`.
    """
    return dtype_name(tensor) in DIFFERENTIABLE


def dense(tensor: Any) -> tf.Tensor:
    """Return the value of a variable; a tensor is dense already.

    Raises:
        UnsupportedTensorError: as `dtype_name`.
    """
    dtype_name(tensor)
    return tensor if type(tensor) is EagerTensor or isinstance(tensor, tf.Tensor) else tf.convert_to_tensor(tensor)


def to_dlpack(tensor: tf.Tensor) -> Any:
    """Return a capsule on the memory of a dense tensor, once its values have been computed."""
    _private.await_pending()
    return tf.experimental.dlpack.to_dlpack(tensor)


def export(tensor: Any) -> Any:
    """Return a capsule on the memory of a tensor; None for a variable, and for what `dense` refuses."""
    return to_dlpack(tensor) if type(tensor) is EagerTensor and tensor.dtype in _NAMES else None


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a read-only view of the values; a copy of a single number, of which TensorFlow shows no view."""
    tensor = dense(tensor)
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def from_numpy(array: np.ndarray[Any, Any]) -> tf.Tensor:
    """Return a tensor of a copy of the values: TensorFlow may keep the memory that it is handed."""
    return tf.convert_to_tensor(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
