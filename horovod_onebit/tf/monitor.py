"""What a run costs, step by step, for TensorBoard and as JSON lines."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_onebit.tf.optimizer import check_ours
from horovod_onebit.tools import monitor


class _TensorBoard(monitor.TensorBoard):
    def __init__(self, log_dir: str) -> None:
        self._writer: Any = tf.summary.create_file_writer(log_dir)

    def add(self, tag: str, value: float, step: int) -> None:
        with self._writer.as_default(step=step):
            tf.summary.scalar(tag, value)

    def flush(self) -> None:
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


class Monitor(monitor.FaceMonitor):
    """Writes ``optimizer.stats()`` every ``every`` steps, on worker 0 alone; the others do nothing. For loops of your
    own; ``fit`` has ``callbacks.StatsCallback``. ::

        with onebit.Monitor(optimizer, jsonl="run.jsonl", tensorboard="runs/1") as monitor:
            for x, y in batches:
                loss = train_step(x, y)  # a tf.function, which monitor.step is not called in
                monitor.step(loss=loss)

    Args:
        optimizer: what ``DistributedOptimizer`` returned.
        jsonl: a file for a JSON object a line; ``horovod-onebit plot`` draws it.
        append: continue the file of a run that is resumed, instead of a new one.
        tensorboard: a folder for TensorBoard; tags begin with ``horovod_onebit/``.
        every: steps from one line to the next. The norms in it cost a pass over the error feedback.
    """

    board = _TensorBoard

    def check(self, optimizer: Any) -> Any:
        return check_ours(optimizer)
