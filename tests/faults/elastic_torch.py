"""An elastic job of a few hundred small steps; tests kill and add workers while it runs.

elastic_torch.py FOLDER STEPS EXCHANGE, or in its place "local" for local steps that hide their exchange, or "frozen"
for those with one second moment for all workers, or "three_bit" for a warm-up of so many bits that does not end, or
"auto" where process sets may be added and the hierarchical exchange is the cheapest: each worker leaves its process id
and its host in FOLDER, worker 0 how far it is, and all of them, at the end, their weights. A worker that finds a file
HOST.nan there gives one NaN. With a file "checkpoints" there, the job saves one every 50 steps, and goes on from the
last one.
"""

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from horovod_onebit.torch import elastic

folder, steps, exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init(process_sets="dynamic" if exchange == "auto" else None)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
teacher = torch.from_numpy(np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32))
LOCAL = {
    "local": onebit.Local(every=8, doubling=5, delay=4),
    "frozen": onebit.Local(every=8, freeze=6),
}
schedule = LOCAL.get(exchange)
warmup = "three_bit" if exchange == "three_bit" else "exact"
optimizer = onebit.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    named_parameters=model.named_parameters(),
    **({"schedule": schedule} if schedule else {"warmup_steps": 5 if warmup == "exact" else 10 * steps}),
    recipe=Recipe(
        block_size=64,
        min_compressed_size=64,
        exchange={"three_bit": "two_stage"}.get(exchange, "direct" if schedule else exchange),
        warmup=warmup,
        link=1e5 if exchange == "auto" else 125e6,
    ),
    check_replicas_every=1,
    overlap=False,  # a NaN is put in after backward()
)
(folder / f"{os.environ['HOROVOD_HOSTNAME']}+{os.getpid()}.pid").touch()
poison = folder / f"{os.environ['HOROVOD_HOSTNAME']}.nan"


def note(text):
    with (folder / "log").open("a") as log:
        log.write(f"{hvd.rank()} {os.getpid()} {text}\n")


@elastic.run
def train(state):
    residuals = sum(float(np.abs(r).sum()) for r in optimizer._compressor.engine.feedback.state_dict().values())
    note(f"trains from step {state.step} with {hvd.size()} workers, residuals {residuals:.6f}")
    if state.step == 0 and (folder / "checkpoint" / "latest.json").exists():
        state.step = onebit.load_checkpoint(folder / "checkpoint", model, optimizer)["step"]
        note(f"resumes at step {state.step}")
    while state.step < steps:
        data = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
        x = torch.randn(16, 24, generator=data)
        optimizer.zero_grad()
        error = ((model(x) - x @ teacher) ** 2).mean()
        error.backward()
        loss = error.item()
        if poison.exists():
            poison.unlink()
            model[0].weight.grad[0, 0] = float("nan")
            note(f"gives NaN in step {state.step}")
        optimizer.step()
        state.step += 1
        if hvd.rank() == 0:
            (folder / "step.new").write_text(f"{state.step} {hvd.size()} {loss}")
            (folder / "step.new").replace(folder / "step")  # never seen half written
        # Before the commit, which raises when hosts come or go: what follows it is then left out.
        if state.step % 50 == 0 and (folder / "checkpoints").exists():
            onebit.save_checkpoint(folder / "checkpoint", model, optimizer, extra={"step": state.step})
        if state.step % 5 == 0:
            state.commit()
        time.sleep(0.02)
    return loss


loss = train(elastic.TorchState(model=model, optimizer=optimizer, step=0))
np.savez(folder / f"weights-{hvd.rank()}.npz", *[p.detach().numpy() for p in model.parameters()])
note(f"done with {hvd.size()} workers, loss {loss:.4f}, {optimizer.stats().phase}")
