"""``python digests.py FILE``, on every rank: worker 0 writes what each kind of run has come to, as digests."""

import json
import sys
from pathlib import Path

import horovod_onebit.torch as onebit
from horovod_onebit import Recipe
from tests.ranks.torch_common import OPTIMIZERS, RANK, Net, digest, train, wrap
from tests.ranks.world import end

STEPS = 20
SCHEDULES = {
    "0/1 Adam": onebit.ZeroOne(var_freeze_step=6, var_update_scaler=2),
    "rounds": onebit.Local(every=4),
    "rounds with a delay": onebit.Local(every=4, delay=2),
    "rounds with a frozen second moment": onebit.Local(every=3, freeze=6),
}
WRAPPING = {
    "sum": {"op": onebit.Sum},
    "divided before": {"gradient_predivide_factor": 3.0},
    "fp16": {"compression": onebit.Compression.fp16},
    "two passes": {"backward_passes_per_step": 2},
    "late": {"overlap": False},
}


def cases():
    """The arguments of ``wrap`` by the name of the run."""
    for number, (kind, options) in enumerate(OPTIMIZERS):
        for recipe in ("robust", "paper", "fixed") if kind.__name__ != "Lion" else ("robust",):
            yield f"{kind.__name__} {number}, {recipe}", {"kind": kind, "recipe": recipe, **options}
    for exchange in ("direct", "two_stage"):
        yield f"small buckets, {exchange}", {"recipe": Recipe(exchange=exchange, bucket_size=4096)}
        for name, schedule in SCHEDULES.items():
            wrapping = {"schedule": schedule}
            yield f"{name}, {exchange}", {
                "recipe": Recipe(exchange=exchange), "warmup_steps": None, "wrapping": wrapping,
            }  # fmt: skip
    for name, wrapping in WRAPPING.items():
        yield name, {"wrapping": wrapping}


def trained(arguments):
    """The digest of a run of ``STEPS`` steps."""
    model = Net()
    optimizer = wrap(model, **arguments)
    train(model, optimizer, STEPS, passes=optimizer.backward_passes_per_step)
    optimizer.flush()
    return digest(model, optimizer)


if __name__ == "__main__":
    found = {name: trained(arguments) for name, arguments in cases()}
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    end()
