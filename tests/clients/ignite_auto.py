"""An Ignite program that knows Horovod alone: ``idist.auto_model``, ``idist.auto_optim``, which passes no names.

Run by ``python -m horovod_onebit.install --warmup-steps 4``.
"""

import sys

import ignite.distributed as idist
import torch
from common import RANK, STEPS, Watch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from torch.nn.functional import cross_entropy

CASES = {"plain": 1, "accumulate": 2}


def main(case):
    passes = CASES[case]
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    model = idist.auto_model(model)  # which broadcasts it
    arguments = {"backward_passes_per_step": passes} if passes > 1 else {}
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2), **arguments)
    watch = Watch(model, optimizer)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy, gradient_accumulation_steps=passes)
    evaluator = create_supervised_evaluator(model)
    x = torch.randn(8 * passes * STEPS // 2, 16, generator=torch.Generator().manual_seed(RANK))
    batches = [(part, part.argmax(1)) for part in x.split(8)]
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches))
    trainer.run(batches, max_epochs=2)
    watch.finish()


if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(lambda local_rank: main(sys.argv[1]))
