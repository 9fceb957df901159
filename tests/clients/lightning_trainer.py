"""Lightning's Trainer: the backward pass and the clipping are inside the closure that it gives to step()."""

import sys
import tempfile
import warnings

import lightning
import torch
from common import RANK, SHARES, STEPS, Watch, optimizer_of, shared
from torch.nn.functional import cross_entropy

CASES = {
    "clip": {"gradient_clip_val": 1.0},
    "tight": {"gradient_clip_val": 0.01},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate": {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2},
    "bf16": {"gradient_clip_val": 0.01, "precision": "bf16-mixed"},
    "manual": {},
    "resume": {"gradient_clip_val": 0.01},
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


class Manual(Classifier):
    """The user's own steps, with the optimizer as Lightning wraps it."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        if index % 3 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.01)
        elif index % 3 == 1:
            optimizer.clip_grad_norm_(0.01)  # ours
        else:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
            return
        optimizer.step()


def fit(case, steps, taken, folder, resume=None):
    lightning.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(8 * 7 * SHARES, 16, generator=generator)  # the last step of an epoch may accumulate fewer passes
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    model = (Manual if case == "manual" else Classifier)(CASES[case].get("accumulate_grad_batches", 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=SHARES, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **CASES[case],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resume)
    model.watch.finish(taken)
    trainer.save_checkpoint(f"{folder}/last.ckpt")


def main(case):
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as own:
        folder = shared(own)
        if case == "resume":
            fit(case, 7, 7, folder)
            fit(case, STEPS, STEPS - 7, folder, f"{folder}/last.ckpt")
        else:
            fit(case, STEPS, STEPS, folder)


main(sys.argv[1])
