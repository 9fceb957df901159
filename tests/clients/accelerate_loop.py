"""A loop with accelerate: prepare(), accumulate(), clip_grad_norm_()."""

import sys
import tempfile

import accelerate
import torch
from common import RANK, SHARES, STEPS, Watch, optimizer_of, shared
from torch.nn.functional import cross_entropy

from tests.ranks.world import world

CASES = {
    "clip": {"clip": 1.0},
    "tight": {"clip": 0.01},
    "value": {"value": 1e-3},
    "accumulate": {"clip": 0.01, "passes": 2},
    "resume": {"clip": 0.01},
}


def main(case):
    clip, value, passes = (CASES[case].get(key) for key in ("clip", "value", "passes"))
    passes = passes or 1
    accelerate.utils.set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    plain = optimizer_of(model, passes)
    watch = Watch(model, plain)
    generator = torch.Generator().manual_seed(RANK)
    x = torch.randn(8 * passes * STEPS * SHARES, 16, generator=generator)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    schedule = torch.optim.lr_scheduler.StepLR(plain, 3)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=passes)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, plain, torch.utils.data.DataLoader(data, batch_size=8), schedule
    )
    for step, (inputs, labels) in enumerate(loader):
        if case == "resume" and step in (3, 7):
            with tempfile.TemporaryDirectory() as own:
                folder = shared(own)
                accelerator.save_state(folder)
                world.barrier()
                accelerator.load_state(folder)
                world.barrier()
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            if accelerator.sync_gradients and value:
                accelerator.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    watch.finish()


main(sys.argv[1])
