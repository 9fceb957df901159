"""The core's ``Collectives`` over Horovod's TensorFlow operations, for NumPy arrays in host memory.

They run eagerly, inside the one host call of a step. TensorFlow runs an eager operation to its end, so a collective
is done when it is started, and ``wait`` only hands the result over.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


def view(tensor: Any) -> NDArray:
    """An eager tensor in host memory as a NumPy array that shares its memory; not to be written to."""
    return np.asarray(memoryview(tensor)) if tensor.shape.rank else np.asarray(tensor)


class _Done:
    def __init__(self, result: NDArray) -> None:
        self.result = result

    def wait(self) -> NDArray:
        return self.result


class HorovodCollectives:
    """One process's view of a Horovod process set. Create it after ``hvd.init()``."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        self.process_set = process_set

    @property
    def rank(self) -> int:
        return self.process_set.rank()

    @property
    def size(self) -> int:
        return self.process_set.size()

    def allgather(self, array: NDArray[np.uint8], name: str) -> _Done:
        with tf.device("/CPU:0"):
            return _Done(view(hvd.allgather(tf.convert_to_tensor(array), name=name, process_set=self.process_set)))

    def alltoall(self, array: NDArray[np.uint8], name: str) -> _Done:
        with tf.device("/CPU:0"):
            splits = tf.fill([self.size], len(array) // self.size)
            tensor = tf.convert_to_tensor(array)
            result, _ = hvd.alltoall(tensor, splits=splits, name=name, process_set=self.process_set)
            return _Done(view(result))

    def allreduce(self, array: NDArray[np.float32] | NDArray[np.int32], name: str) -> _Done:
        with tf.device("/CPU:0"):
            tensor = tf.convert_to_tensor(array)
            return _Done(view(hvd.allreduce(tensor, name=name, op=hvd.Sum, process_set=self.process_set)))
