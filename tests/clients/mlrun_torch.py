"""MLRun's interface for PyTorch, which wraps the optimizer by itself.

Run by ``python -m horovod_onebit.install --warmup-steps 4``.
"""

import sys

import mlrun
import torch
from common import RANK, SIZE, STEPS, Watch
from mlrun.frameworks.pytorch.callbacks import Callback
from mlrun.frameworks.pytorch.mlrun_interface import PyTorchMLRunInterface

EPOCHS = 2


class Watching(Callback):
    """Looks at the optimizer once MLRun has wrapped it."""

    def __init__(self):
        super().__init__()

    def on_horovod_check(self, rank):
        return True

    def on_setup(self, model, optimizer, **others):
        self.watch = Watch(model, optimizer)


def main(case):
    torch.manual_seed(RANK)  # MLRun broadcasts
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(8 * SIZE * STEPS // EPOCHS, 16, generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.argmax(1)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watching = Watching()
    scheduled = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "scheduler_step_frequency": "batch"}
    PyTorchMLRunInterface(model=model, context=mlrun.MLClientCtx()).train(
        data,
        torch.nn.CrossEntropyLoss(),
        optimizer,
        validation_set=data,
        metric_functions=[lambda predicted, true: (predicted.argmax(1) == true).float().mean()],
        epochs=EPOCHS,
        callbacks=[watching],
        use_horovod=True,
        **(scheduled if case == "scheduled" else {}),
    )
    watching.watch.finish()


if __name__ == "__main__":
    main(sys.argv[1])
