"""Measures the network of a job: ``horovodrun ... horovod-onebit link``, one process for each worker, or
``torchrun ... --no-python horovod-onebit link``.

The rate that it finds is what ``Recipe(link=...)`` and ``horovod-onebit plan --link`` ask for. A job takes no
measurement of its own: a busy network at its start would change which exchange ``"auto"`` takes, and so its results.
"""

from __future__ import annotations

import atexit
import importlib
import os
import time
from dataclasses import dataclass

import numpy as np

from horovod_onebit import costs
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives, ranks_by_host
from horovod_onebit.recipe import Recipe
from horovod_onebit.tasks import run

SMALL, LARGE, LONGEST = 1 << 10, 1 << 21, 1 << 26
"""Bytes that a worker sends to all others together, about: they grow until that takes ``ENOUGH``."""

ENOUGH = 0.5
"""Seconds."""

TIMES = 9
"""How often the small message is sent, and the large one."""


@dataclass(frozen=True)
class Link:
    """What ``measure`` found.

    Attributes:
        hosts, workers: of the job.
        rate: bytes a second that a host's network interface receives, headers of the network included; None if all
            workers are on one host.
        latency: seconds from host to host, beyond what a collective takes anyway.
        collective: seconds of the smallest collective.
        spread: largest to smallest time of the large message.
    """

    hosts: int
    workers: int
    rate: float | None
    latency: float
    collective: float
    spread: float


def measure(collectives: Collectives, times: int = TIMES) -> Link:
    """The link between the workers' hosts, the same answer on all workers. Collective.

    By an alltoall: what a host receives is then the same over MPI, Gloo and NCCL, and however ranks are placed. The
    fastest try counts, since other work on the hosts can only make one slower.
    """
    places, _ = run(ranks_by_host(collectives))
    if not places:
        raise ConfigurationError(
            "the hosts have different numbers of workers: expected as many on each, such as -H a:2,b:2"
        )
    hosts, near, n = len(places), len(places[0]), collectives.size

    def seconds(size: int, name: str) -> list[float]:
        """Of the slowest worker, each time."""
        message = np.zeros(n * max(1, size // n), np.uint8)
        found = []
        for i in range(times):
            collectives.allreduce(np.zeros(1, np.float32), f"link.{name}.{i}.start").wait()
            start = time.perf_counter()
            collectives.alltoall(message, f"link.{name}.{i}").wait()
            found.append(time.perf_counter() - start)
        own = np.array(found).view(np.uint8)
        everybody = collectives.allgather(own, f"link.{name}.seconds").wait().view(np.float64)
        return [float(s) for s in everybody.reshape(n, times).max(axis=0)]

    small = min(seconds(SMALL, "small"))
    device = costs.CPU
    latency = max(0.0, (small - device.wait) / 2)
    if hosts == 1:
        return Link(hosts, n, None, latency, small, 1.0)
    size, large = LARGE, seconds(LARGE, "large")
    while min(large) < ENOUGH and size < LONGEST:
        size = min(LONGEST, size * max(2, int(ENOUGH / min(large))))
        large = seconds(size, f"large.{size}")
    taken = min(large) - small
    if taken <= 0:
        raise ConfigurationError(
            f"{size:,} bytes took no longer than {SMALL:,}: the link is too fast, or the hosts too busy, to be measured"
        )
    # Each of a host's workers gets its n-th of what each worker of another host sends.
    received = near * (n - near) * max(1, size // n)
    return Link(hosts, n, received / taken / costs.LINE_RATE, latency, small, max(large) / min(large))


def collectives() -> Collectives:
    """Of this process's job: of torchrun over Gloo, else of Horovod with whichever framework that was built for.

    Raises ``ConfigurationError`` where there is neither.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():  # of torchrun, or of what does its work
        dist = importlib.import_module("torch.distributed")
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
        return _over("torch")
    for face, name in (("torch", "horovod.torch"), ("tf", "horovod.tensorflow")):
        try:
            importlib.import_module(name).init()
            return _over(face)
        except ImportError:
            continue
    raise ConfigurationError(
        "not a job of torchrun, and Horovod works with neither PyTorch nor TensorFlow here: see horovod-onebit doctor"
    )


def _over(face: str) -> Collectives:
    """Those of all workers, as optimizers of this face have them."""
    found: Collectives
    if face == "torch":
        transport = importlib.import_module("horovod_onebit.torch.transport")
        found = transport.choose(call="horovod-onebit link").collectives()
    else:
        found = importlib.import_module("horovod_onebit.tf.collectives").HorovodCollectives()
    return found


def text(link: Link, parameters: int | None = None) -> str:
    """What was found, and what to do with it."""
    hosts = "one host" if link.hosts == 1 else f"{link.hosts} hosts"
    lines = [f"{link.workers} workers on {hosts}; a small collective takes {1e3 * link.collective:.2f} ms"]
    if link.rate is None:
        return "\n".join([*lines, "All workers are on one host: there is no link between hosts to measure."])
    lines += [
        f"a host's link: {8e-6 * link.rate:,.0f} Mbit/s (slowest to fastest try: {link.spread:.2f}), "
        f"latency at most {1e6 * link.latency:,.0f} us",
        "",
        f"Recipe(link={link.rate:.3g})",
    ]
    if parameters is not None:
        ways = costs.ways(parameters, Recipe(link=link.rate), link.workers, link.workers // link.hosts)
        taken = costs.cheapest(ways, link.rate)
        lines += [f'With it, exchange="auto" takes "{taken}" for {parameters:,} parameters on CPUs.']
        if taken == "hierarchical":
            lines += ['In PyTorch over Horovod, that needs hvd.init(process_sets="dynamic").']
    return "\n".join(lines)
