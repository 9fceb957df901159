"""itwinai's ``HorovodStrategy``, which wraps the optimizer by itself, with the arguments that its trainer gives.

Run by ``python -m horovod_onebit.install --warmup-steps 4``.
"""

import os
import sys

import horovod.torch as hvd
import torch
from common import RANK, STEPS, Watch
from itwinai.torch.distributed import HorovodStrategy
from torch.nn.functional import cross_entropy

PLAIN = {"compression": hvd.Compression.none, "op": hvd.Average, "gradient_predivide_factor": 1.0}
CASES = {
    "plain": PLAIN,
    "fp16": PLAIN | {"compression": hvd.Compression.fp16},
    "predivide": PLAIN | {"gradient_predivide_factor": 2.0},
    "resume": PLAIN,
}


def distributed(strategy, case, saved=None):
    """Model, optimizer and schedule as the trainer makes them, from a checkpoint where there is one."""
    torch.manual_seed(RANK)  # the strategy broadcasts
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if saved:
        for part, state in zip((model, optimizer, schedule), saved, strict=True):
            part.load_state_dict(state)
    model, optimizer, schedule = strategy.distributed(model, optimizer, schedule, **CASES[case])
    return model, optimizer, schedule


def train(strategy, model, optimizer, schedule, steps):
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(16 * steps, 16, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.argmax(1))
    loader = strategy.create_dataloader(data, batch_size=8)  # which gives each worker its share
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    # The schedule is of the optimizer that was wrapped.
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    losses = strategy.gather_obj(cross_entropy(model(inputs), labels).item())
    assert (losses is not None) == strategy.is_main_worker


def main(case):
    os.environ["ITWINAI_FORCE_DIST"] = "1"  # it knows the variables of torchrun and Slurm
    strategy = HorovodStrategy()
    strategy.init()
    parts = distributed(strategy, case)
    watch = Watch(*parts[:2])
    train(strategy, *parts, STEPS)
    watch.finish()
    if case == "resume":
        parts = distributed(strategy, case, [part.state_dict() for part in parts])
        watch = Watch(*parts[:2])
        train(strategy, *parts, STEPS)
        watch.finish()
    strategy.clean_up()


if __name__ == "__main__":
    main(sys.argv[1])
