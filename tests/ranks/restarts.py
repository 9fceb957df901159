"""``torchrun --max-restarts 1 restarts.py FOLDER [STEP]``: train to step 12, with a checkpoint after every fourth step.

In the first attempt, the last worker kills itself after STEP steps. Who comes to the end trains without a break, too,
and worker 0 prints digests of both.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from tests.ranks.torch_common import RANK, SIZE, Net, assert_replicas_equal, digest, train, wrap
from tests.ranks.world import end

STEPS, EVERY = 12, 4


def trained(folder, killed_after=None):
    """The step after that of the checkpoint in ``folder``, and a digest of what comes of it."""
    model = Net()
    optimizer = wrap(model, warmup_steps=3, recipe=Recipe(block_size=64))
    first = 0
    if (folder / "latest.json").exists():
        first = onebit.load_checkpoint(folder, model, optimizer)["steps"]
    for step in range(first, STEPS):
        if step == killed_after and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, 1, start=step)
        if (step + 1) % EVERY == 0:
            onebit.save_checkpoint(folder, model, optimizer, extra={"steps": step + 1})
    assert_replicas_equal(model)
    assert optimizer.phase.value == "compressed"
    return first, digest(model, optimizer)


def main():
    logging.basicConfig()
    folder, killed_after = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    first, found = trained(folder / "killed", killed_after)
    _, undisturbed = trained(folder / "undisturbed")
    if RANK == 0:
        sys.stdout.write(f"trained from step {first}: {found}, without a break: {undisturbed}\n")


if __name__ == "__main__":
    main()
    end()
