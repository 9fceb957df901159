"""transformers' Trainer, unmodified: it clips to max_grad_norm between backward() and step()."""

import sys
import tempfile

import torch
import transformers
from common import RANK, SHARES, STEPS, Watch, optimizer_of, shared

CASES = {
    "clip": {"max_grad_norm": 1.0},
    "tight": {"max_grad_norm": 0.01},
    "norm": {"max_grad_norm": 0.0},  # looks at the norm by way of clip_grad_norm_(..., inf)
    "accumulate": {"max_grad_norm": 0.01, "gradient_accumulation_steps": 2},
    "resume": {"max_grad_norm": 0.01, "save_strategy": "steps", "save_steps": 7},
}


class Words(torch.utils.data.Dataset):
    """Sentences of random words; each worker has its own."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(RANK)
        self.ids = torch.randint(0, 64, (size, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(options, folder, steps, resume=None):
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = optimizer_of(model, options.get("gradient_accumulation_steps", 1))
    watch = Watch(model, optimizer)
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        logging_steps=1, disable_tqdm=True, **({"save_strategy": "no"} | options),
    )  # fmt: skip
    # 44 sentences for a worker: an epoch ends with fewer passes, where gradients are accumulated.
    trainer = transformers.Trainer(model, arguments, train_dataset=Words(44 * SHARES), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    watch.finish(steps)


def main(case):
    with tempfile.TemporaryDirectory() as own:
        folder = shared(own)
        train(CASES[case], folder, STEPS)
        if case == "resume":
            train(CASES[case], folder, STEPS - 7, f"{folder}/checkpoint-7")


main(sys.argv[1])
