"""What an exchange costs: the one model that ``exchange="auto"`` and ``horovod-onebit plan`` both decide by.

    step     = compute + codec + what of the transfer is not hidden behind the backward pass
    transfer = a host's bytes / link + rounds * latency + the processors' work on each byte

The link is a host's network interface, the same in both directions; all of a host's workers share it. An allgather is
a ring, as in Gloo and NCCL: the first worker of a host receives all messages but its own over the link, those of the
host's other workers, too. An alltoall brings what the host's workers serve.

The constants of ``CPU`` were measured (`make bench`; ``scatter`` by ``python -m benchmarks.local``); those of ``GPU``
follow from its memory's bandwidth and are an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from horovod_onebit import codecs
from horovod_onebit.recipe import Recipe

LINE_RATE = 1448 / 1514
"""The share of a link's bits that is data: TCP over Ethernet with an MTU of 1,500."""

HEADER = 48
"""Bytes of a message besides its records, padding included."""

LATENCY = 1e-4
"""Seconds from host to host, where nobody knows better."""


@dataclass(frozen=True)
class Device:
    """Nanoseconds that a worker's processor spends on each parameter.

    Attributes:
        encode: compress one parameter.
        apply: decode one message and take the optimizer's step.
        decode: each further message.
        adam: the optimizer's own step without compression.
        reduce: an allreduce's copies and sums of a float32 parameter, between two workers.
        half: the same for float16.
        scatter: bring a float32 gradient to the worker of the host that adds them up.
        gather: cost of a message's arrival.
        efficiency, half_efficiency: share of the link's rate that an allreduce of float32 or float16 reaches.
        wait: seconds that a collective takes at least, beyond the link's latency.
    """

    name: str
    encode: float
    apply: float
    decode: float
    adam: float
    reduce: float
    half: float
    scatter: float
    gather: float
    efficiency: float
    half_efficiency: float
    wait: float


CPU = Device(
    "cpu", encode=0.72, apply=0.56, decode=0.03, adam=0.50, reduce=9.0, half=5.0, scatter=4.0, gather=0.3,
    efficiency=0.73, half_efficiency=0.80, wait=1e-3,
)  # fmt: skip
# Bytes that pass through memory, at 4 TB/s; and for ``scatter`` between GPUs, at PCIe 4.0's 25 GB/s.
GPU = Device(
    "gpu", encode=0.005, apply=0.006, decode=0.0001, adam=0.007, reduce=0.006, half=0.004, scatter=0.16, gather=0.0001,
    efficiency=0.9, half_efficiency=0.9, wait=1e-4,
)  # fmt: skip
GPU_BY_HOST = replace(GPU, name="gpu-without-nccl", scatter=CPU.scatter)
"""Where Horovod has no NCCL, the workers of a host add up in its memory."""
DEVICES = {device.name: device for device in (CPU, GPU, GPU_BY_HOST)}


@dataclass(frozen=True)
class Way:
    """One way of exchanging a step's messages.

    Attributes:
        received: bytes that come over a host's link.
        rounds: collectives that wait for each other.
        work: seconds of a processor on what arrives, while it arrives.
        codec: seconds of a processor beyond the optimizer's own step, when nothing else can be done.
    """

    received: float
    rounds: int
    work: float
    codec: float

    def stream(self, link: float) -> float:
        """Seconds of transfer by a link of so many bytes a second, latency apart."""
        return self.received / (link * LINE_RATE) + self.work

    def seconds(self, link: float, device: Device) -> float:
        """All that it takes, if nothing is hidden behind the backward pass."""
        return self.stream(link) + self.rounds * (device.wait + 2 * LATENCY) + self.codec


def message_bytes(elements: int, recipe: Recipe, *, served: bool = False) -> float:
    """Bytes of all of a worker's messages of ``elements`` parameters; with ``served``, of all servers' together."""
    codec = codecs.find(recipe.server_codec if served else recipe.codec)
    buckets = max(1, -(-elements // recipe.bucket()))
    return codec.size(elements, recipe.block_size_for(elements)) + HEADER * buckets


def ways(
    elements: int, recipe: Recipe, workers: int, workers_per_host: int = 1, device: Device = CPU
) -> Mapping[str, Way]:
    """All ways for ``workers``, by the names of the exchanges; ``hierarchical`` where there are such hosts."""
    message, answer = (message_bytes(elements, recipe, served=served) for served in (False, True))
    unit, n, far = 1e-9 * elements, workers, workers - workers_per_host
    ring = n - 1 if far else 0
    step = device.encode + device.apply - device.adam
    gather = device.gather * answer / message
    # Serving: each share is decoded for all workers and encoded once more.
    serve = (device.encode + device.decode * n) / n
    direct = device.gather * (n - 1), step + device.decode * (n - 1)
    two_stage = (device.gather + gather) * (n - 1) / n, step + serve
    found = {
        "direct": Way(ring * message, 1, *(unit * cost for cost in direct)),
        "two_stage": Way(
            far / n * workers_per_host * message + ring / n * answer, 2, *(unit * cost for cost in two_stage)
        ),
    }
    hosts = workers // workers_per_host
    if hosts > 1 and workers_per_host > 1:
        found["hierarchical"] = _hierarchical(elements, recipe, hosts, workers_per_host, device)
    return found


def _hierarchical(elements: int, recipe: Recipe, hosts: int, local: int, device: Device) -> Way:
    """Each of the ``local`` workers of a host has its part of the work between the hosts."""
    direct = between_hosts(elements, recipe, hosts) == "direct"
    between = ways(elements, recipe, hosts, 1, device)["direct" if direct else "two_stage"]
    message, answer = (message_bytes(elements, recipe, served=served) for served in (False, True))
    # What the others of the host have received comes from them: all messages, or their mean.
    shared = hosts if direct else answer / message
    unit, others = 1e-9 * elements, (local - 1) / local
    work = between.work / local + unit * others * (device.scatter + device.gather * shared)
    decode = device.decode * (hosts - 1) if direct else 0.0
    codec = unit * (device.encode / local + device.apply + decode - device.adam)
    return Way(between.received, between.rounds + 2, work, codec)


def between_hosts(elements: int, recipe: Recipe, hosts: int) -> str:
    """How ``hierarchical`` goes from host to host: the same for workers on whatever devices."""
    return cheapest(ways(elements, recipe, hosts), recipe.link)


def cheapest(of: Mapping[str, Way], link: float, device: Device = CPU) -> str:
    """The name of the way that takes least; of several within a twentieth, the first, which compresses least often."""
    seconds = {name: way.seconds(link, device) for name, way in of.items()}
    return next(name for name in of if seconds[name] <= 1.05 * min(seconds.values()))
