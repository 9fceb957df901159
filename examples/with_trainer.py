"""transformers' Trainer (pip install "transformers[torch]"):

horovodrun -np 2 --gloo python examples/with_trainer.py
"""

import tempfile

import horovod.torch as hvd
import torch
import transformers

import horovod_onebit.torch as onebit


class Words(torch.utils.data.Dataset):
    """Sequences that count upwards; each worker has its own."""

    def __init__(self, size, rank):
        first = torch.randint(0, 64, (size, 1), generator=torch.Generator().manual_seed(rank))
        self.ids = (first + torch.arange(16)) % 64

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    hvd.init()
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters(), warmup_steps=20
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    onebit.broadcast_optimizer_state(optimizer, root_rank=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=100, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=50,
            save_strategy="no", report_to=[], disable_tqdm=hvd.rank() > 0,
        )  # fmt: skip
        data = Words(512, hvd.rank())
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
    if hvd.rank() == 0:
        print(optimizer.stats())


if __name__ == "__main__":
    main()
