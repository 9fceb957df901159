"""Lightning (pip install lightning):

horovodrun -np 2 --gloo python examples/with_lightning.py
"""

import horovod.torch as hvd
import lightning
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def training_step(self, batch, index):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        self.optimizer = onebit.DistributedOptimizer(
            torch.optim.AdamW(self.parameters(), lr=1e-3), named_parameters=self.named_parameters(), warmup_steps=20
        )
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)
        onebit.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return self.optimizer


def main():
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(8192, 64)
    y = (x @ torch.randn(64, 10)).argmax(1)
    share = torch.utils.data.TensorDataset(x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()])
    model = Classifier()
    trainer = lightning.Trainer(
        devices=1, max_epochs=3, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=hvd.rank() == 0,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(share, batch_size=64, shuffle=True, drop_last=True))
    if hvd.rank() == 0:
        print(model.optimizer.stats())


if __name__ == "__main__":
    main()
