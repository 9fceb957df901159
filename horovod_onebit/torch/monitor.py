"""What a run costs, step by step, for TensorBoard and as JSON lines."""

from __future__ import annotations

from typing import Any

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.tools import monitor
from horovod_onebit.torch.optimizer import check_ours


class _TensorBoard(monitor.TensorBoard):
    def __init__(self, log_dir: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError("tensorboard is not installed: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(log_dir)

    def add(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def end(self) -> None:
        self._writer.close()


class Monitor(monitor.FaceMonitor):
    """Writes ``optimizer.stats()`` every ``every`` steps, on worker 0 alone; the others do nothing. ::

        with onebit.Monitor(optimizer, jsonl="run.jsonl", tensorboard="runs/1") as monitor:
            for x, y in batches:
                ...
                optimizer.step()
                monitor.step(loss=loss)

    Args:
        optimizer: what ``DistributedOptimizer`` returned.
        jsonl: a file for a JSON object a line; ``horovod-onebit plot`` draws it.
        append: continue the file of a run that is resumed, instead of overwriting it.
        tensorboard: a folder for TensorBoard; tags begin with ``horovod_onebit/``.
        every: optimizer steps from one line to the next. The norms in it cost a pass over the error feedback.
    """

    board = _TensorBoard

    def check(self, optimizer: Any) -> Any:
        return check_ours(optimizer)
