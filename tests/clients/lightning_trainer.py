"""Lightning's Trainer: the backward pass and the clipping are inside the closure that it gives to step()."""

import sys
import warnings

import lightning
import torch
from common import RANK, STEPS, Watch, optimizer_of
from torch.nn.functional import cross_entropy

CASES = {
    "clip": {"gradient_clip_val": 1.0},
    "tight": {"gradient_clip_val": 0.01},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate": {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2},
    "bf16": {"gradient_clip_val": 0.01, "precision": "bf16-mixed"},
}


class Classifier(lightning.LightningModule):
    def __init__(self, passes):
        super().__init__()
        self.passes = passes
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def training_step(self, batch, index):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = optimizer_of(self, self.passes)
        self.watch = Watch(self, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(case):
    warnings.simplefilter("ignore")
    options = CASES[case]
    lightning.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(8 * 24, 16, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    model = Classifier(options.get("accumulate_grad_batches", 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    model.watch.finish()


main(sys.argv[1])
