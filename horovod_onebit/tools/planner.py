"""Predicts the bytes and the time of a step for a model, a number of workers and a link, by each way of exchanging.

    step     = compute + codec + exposed
    exposed  = max(transfer beyond what the backward pass hides, the last bucket)
    transfer = a host's bytes / (link * efficiency) + waits * latency + the host's work on each byte

The link is a host's network interface, the same in both directions; all of a host's workers share it. A ring allreduce
takes 2 (n - 1) / n of its data through every link, an allgather (n - 1) messages, an alltoall what is not for this
host. The constants of ``CPU`` were measured by `make bench`; those of ``GPU`` follow from its
memory's bandwidth and are an estimate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from horovod_onebit import checks
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.recipe import Recipe
from horovod_onebit.tools import show

LINE_RATE = 1448 / 1514
"""The share of a link's bits that is data: TCP over Ethernet with an MTU of 1,500."""

HEADER = 48
"""Bytes of a message besides scales and bits, padding included."""


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
    gather: float
    efficiency: float
    half_efficiency: float
    wait: float


CPU = Device(
    "cpu", encode=0.72, apply=0.56, decode=0.03, adam=0.50, reduce=9.0, half=3.9, gather=0.3,
    efficiency=0.73, half_efficiency=0.80, wait=1e-3,
)  # fmt: skip
# Bytes that pass through memory, at 4 TB/s.
GPU = Device(
    "gpu", encode=0.005, apply=0.006, decode=0.0001, adam=0.007, reduce=0.006, half=0.004, gather=0.0001,
    efficiency=0.9, half_efficiency=0.9, wait=1e-4,
)  # fmt: skip
DEVICES = {device.name: device for device in (CPU, GPU)}


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Attributes:
        parameters: elements that are trained.
        workers, workers_per_host: processes in all, and on each host.
        link: bytes per second of a host's network interface.
        latency: seconds from host to host.
        compute: seconds of forward and backward pass and the optimizer's step of one worker.
        backward: share of ``compute`` that communication can hide behind.
        device: what codec and optimizer run on.
    """

    parameters: int
    workers: int
    link: float
    compute: float
    workers_per_host: int = 1
    latency: float = 1e-4
    backward: float = 0.6
    device: Device = CPU

    def __post_init__(self) -> None:
        for name in ("parameters", "workers", "workers_per_host"):
            checks.whole(name, getattr(self, name))
        if self.workers % self.workers_per_host:
            raise ConfigurationError(
                f"{self.workers} workers do not fill hosts of {self.workers_per_host}: expected a multiple"
            )
        if not checks.finite("link", self.link, "bytes a second") > 0:
            raise ConfigurationError(f"link={self.link}: expected a positive rate")
        for name in ("compute", "latency"):
            checks.finite(name, getattr(self, name), "seconds")
        if not 0 <= checks.number("backward", self.backward) <= 1:
            raise ConfigurationError(f"backward={self.backward!r}: expected a share of compute, from 0 to 1")

    @property
    def hosts(self) -> int:
        return self.workers // self.workers_per_host


@dataclass(frozen=True)
class Estimate:
    """One way of exchanging: ``received`` bytes by a host, ``transfer``, ``exposed``, ``step`` in seconds."""

    way: str
    received: float
    transfer: float
    exposed: float
    step: float


@dataclass(frozen=True)
class Plan:
    """All estimates of a job, and the conclusion."""

    job: Job
    estimates: tuple[Estimate, ...]

    @property
    def uncompressed(self) -> Estimate:
        """The faster one of float32 and float16."""
        return min((e for e in self.estimates if e.way in UNCOMPRESSED), key=lambda e: e.step)

    @property
    def best(self) -> Estimate:
        """The fastest 1-bit exchange."""
        return min((e for e in self.estimates if e.way not in UNCOMPRESSED), key=lambda e: e.step)

    @property
    def speedup(self) -> float:
        """Steps per second of the best 1-bit exchange to those of the best uncompressed one."""
        return self.uncompressed.step / self.best.step

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence."""
        best, plain = self.best, self.uncompressed
        if self.job.workers == 1:
            return "1-bit does not pay: there is one worker, and nothing to send."
        if self.speedup < 1.05:
            return (
                f"1-bit does not pay: {plain.way} takes {1e3 * plain.step:.0f} ms a step, of which "
                f"{1e3 * plain.exposed:.0f} ms are spent waiting for the network; {best.way} {1e3 * best.step:.0f} ms."
            )
        return f"1-bit pays: {best.way} takes {self.speedup:.1f} times as many steps a second as {plain.way}."

    def as_dict(self) -> dict[str, object]:
        return {"job": asdict(self.job), "estimates": [asdict(e) for e in self.estimates], "verdict": self.verdict}


UNCOMPRESSED = ("float32", "float16")


def message_bytes(parameters: int, recipe: Recipe | None = None) -> float:
    """Bytes of all of a worker's messages: a bit for each parameter, a scale for each block, headers."""
    recipe = recipe or Recipe()
    scales = 4 * math.ceil(parameters / recipe.block_size) if recipe.block_size else 0
    return parameters / 8 + scales + HEADER * math.ceil(parameters / recipe.bucket_size)


def plan(job: Job) -> Plan:
    """Estimate a step of ``job`` by every way of exchanging."""
    n, size = job.workers, job.parameters
    ring = 2 * (n - 1) / n
    ways = [
        _uncompressed(job, "float32", ring * 4 * size, ring * job.device.reduce, job.device.efficiency),
        _uncompressed(job, "float16", ring * 2 * size, ring * job.device.half, job.device.half_efficiency),
    ]
    message = message_bytes(size)
    direct = (n - job.workers_per_host) * message
    ways.append(_compressed(job, "1-bit direct", direct, rounds=1, codec=_codec(job.device, n)))
    far = n - job.workers_per_host
    scatter, gather = job.workers_per_host * far / n * message, far / n * message
    # Serving: each share is decoded for all workers and encoded once more.
    serve = (job.device.encode + job.device.decode * n) / n
    two_stage = _codec(job.device, 1) + serve
    ways.append(_compressed(job, "1-bit two-stage", scatter + gather, rounds=2, codec=two_stage))
    if job.workers_per_host > 1 and job.hosts > 1:
        # Each worker encodes its share, of the sum of its host's gradients.
        own = job.device.encode / job.workers_per_host + job.device.reduce
        codec = own + _codec(job.device, job.hosts) - job.device.encode
        ways.append(_compressed(job, "1-bit hierarchical", (job.hosts - 1) * message, rounds=3, codec=codec))
    return Plan(job, tuple(ways))


def _codec(device: Device, messages: int) -> float:
    """Nanoseconds a parameter that a compressed step takes beyond the optimizer's own."""
    return device.encode + device.apply + device.decode * (messages - 1) - device.adam


def _uncompressed(job: Job, way: str, received: float, host: float, efficiency: float) -> Estimate:
    """``host`` is nanoseconds a parameter."""
    wire = received / (job.link * LINE_RATE * efficiency) if job.hosts > 1 else 0.0
    work = 1e-9 * host * job.parameters if job.workers > 1 else 0.0
    return _estimate(job, way, received, wire + work, rounds=1, codec=0.0, last=0.1)


def _compressed(job: Job, way: str, received: float, *, rounds: int, codec: float) -> Estimate:
    """``codec`` is nanoseconds a parameter."""
    wire = received / (job.link * LINE_RATE) if job.hosts > 1 else 0.0
    work = 1e-9 * job.device.gather * job.parameters * received / message_bytes(job.parameters)
    # The last bucket is known only when the backward pass ends.
    last = min(1.0, Recipe().bucket_size / job.parameters)
    return _estimate(job, way, received, wire + work, rounds=rounds, codec=codec, last=last)


def _estimate(
    job: Job, way: str, received: float, stream: float, *, rounds: int, codec: float, last: float
) -> Estimate:
    waits = 0.0 if job.workers == 1 else rounds * (job.device.wait + 2 * job.latency)
    transfer = stream + waits
    exposed = max(transfer - job.backward * job.compute, last * stream + waits)
    step = job.compute + 1e-9 * codec * job.parameters + exposed
    return Estimate(way, received if job.hosts > 1 else 0.0, transfer, exposed, step)


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def number(text: str) -> int:
    """``110M``, ``1.3B``, ``25_000_000`` -> a whole number."""
    cleaned = text.strip().lower().replace("_", "").replace(",", "").replace("b", "g")
    unit = cleaned[-1:] if cleaned[-1:].isalpha() else ""
    try:
        return round(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigurationError(f"{text!r}: expected a number such as 25000000, 110M or 1.3B") from None


def rate(text: str) -> float:
    """``10gbit``, ``100mbit`` (bits per second), ``1.2GB`` (bytes) -> bytes per second."""
    cleaned = text.strip().removesuffix("/s")
    lowered = cleaned.lower()
    for suffix, bits in (("bit", 8), ("bps", 8), ("B", 1)):
        if (cleaned if suffix == "B" else lowered).endswith(suffix):
            body = lowered[: -len(suffix)]
            unit = body[-1:] if body[-1:].isalpha() else ""
            try:
                value = float(body.removesuffix(unit)) * _UNITS[unit] / bits
            except (KeyError, ValueError):
                break
            if 0 < value < math.inf:
                return value
    raise ConfigurationError(f"link {text!r}: expected a rate such as 1gbit, 100mbit or 1.2GB")


def plot(job: Job, path: str) -> None:
    """Draw the step time over the number of workers, up to 1,024; needs matplotlib."""
    counts = [job.workers_per_host * 2**k for k in range(11) if job.workers_per_host * 2**k <= max(1024, job.workers)]
    plans = [plan(replace(job, workers=n)) for n in counts]
    figure = show.figure(6.4, 4.8)
    axes = figure.subplots()
    for i, estimate in enumerate(plans[0].estimates):
        axes.plot(counts, [1e3 * one.estimates[i].step for one in plans], marker="o", label=estimate.way)
    axes.set(yscale="log", xlabel="workers", ylabel="milliseconds a step")
    axes.set_xscale("log", base=2)
    axes.legend()
    show.save(figure, path)
