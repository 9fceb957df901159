"""Predicts the bytes and the time of a step for a model, a number of workers and a link, by each way of exchanging.

``horovod_onebit.costs`` has the model. A ring allreduce takes 2 (n - 1) / n of its data through every link.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, replace

from horovod_onebit import checks, coded, costs
from horovod_onebit.costs import CPU, LINE_RATE, Device, Way
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.recipe import Recipe
from horovod_onebit.schedule import resolve
from horovod_onebit.tools import show

PER_BYTE, PER_PARAMETER = 13.5e-9, 4.8e-9
"""Seconds that a worker on the same core costs an exchange, for each byte received and for each parameter. Measured: 3
and 4 hosts on two cores, `python -m benchmarks.link`."""


SPARE = replace(CPU, reduce=3.0, half=1.6)
"""Where other cores do what an allreduce costs a processor, at best: between two processes of one machine, over TCP,
with a core each and nothing else to do (`python -m benchmarks.local`). What ``CPU`` has was measured between hosts of
one core."""

FEW = replace(CPU, encode=0.8, apply=1.45, decode=0.4, adam=0.0)
"""Three bits of a gradient; ``apply`` is with the optimizer's own step. Measured by `python benchmarks/codec.py`,
beside one bit and where that takes as long as on the ``CPU``; ``decode`` is an estimate."""


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
        recipe: what the compressed ways send.
        process_sets: whether ``hierarchical`` can be: not for 0/1 Adam, and in PyTorch (Keras needs no process sets)
            with ``hvd.init(process_sets="dynamic")`` only.
        workers_per_core: how many workers take turns on a core, where hosts are simulated on one machine. Each beyond
            the first delays an exchange by ``PER_BYTE`` and ``PER_PARAMETER``.
        every: steps of a round, with ``schedule=Local(every=...)``; 1 without.
        delay: that of ``Local``: the exchange at the end of a round is hidden behind so many steps of the next one.
    """

    parameters: int
    workers: int
    link: float
    compute: float
    workers_per_host: int = 1
    latency: float = costs.LATENCY
    backward: float = 0.6
    device: Device = CPU
    recipe: Recipe = field(default_factory=Recipe)
    process_sets: bool = True
    workers_per_core: float = 1.0
    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "workers", "workers_per_host", "every"):
            checks.whole(name, getattr(self, name))
        if self.workers % self.workers_per_host:
            raise ConfigurationError(
                f"{self.workers} workers do not fill hosts of {self.workers_per_host}: expected a multiple"
            )
        if not checks.finite("link", self.link, "bytes a second") > 0:
            raise ConfigurationError(f"link={self.link}: expected a positive rate")
        checks.flag("process_sets", self.process_sets)
        if not checks.finite("workers_per_core", self.workers_per_core) >= 1:
            raise ConfigurationError(f"workers_per_core={self.workers_per_core!r}: expected 1 or more")
        for name in ("compute", "latency"):
            checks.finite(name, getattr(self, name), "seconds")
        if checks.whole("delay", self.delay, least=0) > (self.every if self.every > 1 else 0):
            raise ConfigurationError(f"delay={self.delay}: expected at most every={self.every}, and local steps")
        if not 0 <= checks.number("backward", self.backward) <= 1:
            raise ConfigurationError(f"backward={self.backward!r}: expected a share of compute, from 0 to 1")

    @property
    def hosts(self) -> int:
        return self.workers // self.workers_per_host


@dataclass(frozen=True)
class Estimate:
    """One way of exchanging: ``received`` bytes by a host, ``transfer``, ``exposed``, ``step`` in seconds; of a step,
    on the average of a round."""

    way: str
    received: float
    transfer: float
    exposed: float
    step: float


@dataclass(frozen=True)
class Prediction:
    """All estimates of a job, and the conclusion.

    Attributes:
        auto: the way that ``exchange="auto"`` takes with a recipe that is given the job's link.
        unaware: the way that it takes with the job's recipe as it is, and what that costs on the job's link.
        spare: the faster one of float32 and float16 on hosts with spare cores, if the device is a CPU.
        warmup: a step of the warm-up whose gradients travel in few bits; None if the recipe's is exact, with local
            steps, which have none, and of gradients on GPUs, where it was not measured.
    """

    job: Job
    estimates: tuple[Estimate, ...]
    auto: str
    unaware: Estimate
    spare: Estimate | None
    warmup: Estimate | None

    def _of(self, way: str) -> Estimate:
        return next(e for e in self.estimates if e.way == way)

    @property
    def uncompressed(self) -> Estimate:
        """The faster one of float32 and float16."""
        return min((e for e in self.estimates if e.way in UNCOMPRESSED), key=lambda e: e.step)

    @property
    def best(self) -> Estimate:
        """The fastest 1-bit exchange; that of ``auto`` unless it takes a twentieth longer."""
        auto = self._of(self.auto)
        fastest = min((e for e in self.estimates if e.way not in UNCOMPRESSED), key=lambda e: e.step)
        return auto if auto.step <= 1.05 * fastest.step else fastest

    @property
    def speedup(self) -> float:
        """Steps per second of the best 1-bit exchange to those of the best uncompressed one."""
        return self.uncompressed.step / self.best.step

    @property
    def advice(self) -> str:
        """What to write into the recipe, if ``"auto"`` would not take the best way of itself."""
        best = self.best
        grouped = ' In PyTorch over Horovod it needs hvd.init(process_sets="dynamic").'
        needs = grouped if best.way == WAYS["hierarchical"] else ""
        slow = f"{self.unaware.way}, {1e3 * self.unaware.step:.0f} ms"
        if self.unaware.step <= 1.05 * best.step:
            return needs
        if self._of(self.auto).step <= 1.05 * best.step:
            return f"{needs} Tell it the link by Recipe(link={self.job.link:g}), or it takes {slow}."
        exchange = next(name for name, way in WAYS.items() if way == best.way)
        return f'{needs} Take it by Recipe(exchange={exchange!r}); "auto" takes {slow}.'

    @property
    def verdict(self) -> str:
        """The conclusion in a sentence or two."""
        best, plain = self.best, self.uncompressed
        if self.job.workers == 1:
            return "1-bit does not pay: there is one worker, and nothing to send."
        if self.speedup < PAYS:
            return (
                f"1-bit does not pay: {plain.way} takes {1e3 * plain.step:.0f} ms a step, of which "
                f"{1e3 * plain.exposed:.0f} ms are spent waiting for the network; {best.way} {1e3 * best.step:.0f} ms."
            )
        times = f"{self.speedup:.1f} times as many steps a second as {plain.way}"
        return f"1-bit pays: {best.way} takes {times}{self._at_least}.{self.advice}"

    @property
    def _at_least(self) -> str:
        """The gain on hosts with spare cores, on which the uncompressed ways cost less."""
        if self.spare is None:
            return ""
        gain = self.spare.step / self.best.step
        where = "if spare cores do the work of an allreduce"
        return f" ({gain:.1f} times {where})" if gain >= PAYS else f" (it does not pay {where})"

    @property
    def before(self) -> str:
        """What steps cost until compression starts, if 1-bit pays; else nothing."""
        if self.warmup is None or self.speedup < PAYS:
            return ""
        exact, few = (1e3 * step for step in (self._of("float32").step, self.warmup.step))
        return (
            f"In the warm-up, some 200 steps by default, a step takes {few:,.0f} ms, and each of its first ten, "
            f"which are exact, {exact:,.0f} ms."
        )

    def as_dict(self) -> dict[str, object]:
        estimates = [asdict(e) for e in self.estimates]
        said = {"auto": self.auto, "verdict": self.verdict, "before": self.before}
        spare = None if self.spare is None else asdict(self.spare)
        return {"job": asdict(self.job), "estimates": estimates, "spare": spare, **said}


PAYS = 1.05
"""Times as many steps a second, at least, where 1-bit is said to pay."""
UNCOMPRESSED = ("float32", "float16")
WAYS = {"direct": "1-bit direct", "two_stage": "1-bit two-stage", "hierarchical": "1-bit hierarchical"}
"""By the names of the exchanges."""


def plan(job: Job) -> Prediction:
    """Estimate a step of ``job`` by every way of exchanging."""
    device = job.device
    estimates = _uncompressed(job, device)
    spare = min(_uncompressed(job, SPARE), key=lambda e: e.step) if device is CPU else None
    ways, untold = _ways(job, replace(job.recipe, link=job.link), device), _ways(job, job.recipe, device)
    auto, unaware = costs.cheapest(ways, job.link, device), costs.cheapest(untold, job.recipe.link, device)
    estimates += [_compressed(job, name, way) for name, way in ways.items()]
    found = _compressed(job, unaware, untold[unaware])
    return Prediction(job, tuple(estimates), WAYS[auto], found, spare, _few_bits(job))


def _ways(job: Job, recipe: Recipe, device: costs.Device) -> dict[str, Way]:
    """Those that are possible, by name."""
    found = dict(costs.ways(job.parameters, recipe, job.workers, job.workers_per_host, device))
    if not job.process_sets:
        found.pop("hierarchical", None)
    return found


def _few_bits(job: Job) -> Estimate | None:
    recipe = resolve(replace(job.recipe, link=job.link), None)
    if job.device is not CPU or job.every > 1 or recipe.warmup == "exact":
        return None
    ways = _ways(job, coded.own_recipe(recipe), FEW)
    name = costs.cheapest(ways, job.link, FEW)
    return _compressed(job, name, ways[name])


def _uncompressed(job: Job, device: Device) -> list[Estimate]:
    """``UNCOMPRESSED``, by an allreduce on such processors."""
    ring = 2 * (job.workers - 1) / job.workers
    costs_of = (4, device.reduce, device.efficiency), (2, device.half, device.half_efficiency)
    found = []
    for way, (size, nanoseconds, efficiency) in zip(UNCOMPRESSED, costs_of, strict=True):
        received = ring * size * job.parameters
        wire = received / (job.link * LINE_RATE * efficiency) if job.hosts > 1 else 0.0
        work = ring * 1e-9 * nanoseconds * job.parameters
        found.append(_estimate(job, way, received, wire + work, rounds=1, codec=0.0, last=0.1))
    return found


def _compressed(job: Job, name: str, way: Way) -> Estimate:
    # The last bucket is known only when the backward pass ends.
    last = min(1.0, job.recipe.bucket(on_gpus=job.device is not CPU) / job.parameters)
    return _estimate(job, WAYS[name], way.received, way.stream(job.link), rounds=way.rounds, codec=way.codec, last=last)


def _estimate(
    job: Job, way: str, received: float, stream: float, *, rounds: int, codec: float, last: float
) -> Estimate:
    waits = 0.0 if job.workers == 1 else rounds * (job.device.wait + 2 * job.latency)
    stream += (job.workers_per_core - 1) * (PER_BYTE * received + PER_PARAMETER * job.parameters)
    transfer = stream + waits
    if job.every > 1 and way not in UNCOMPRESSED:
        hidden = job.delay * job.compute
        exposed = max(0.0, transfer - hidden) / job.every
        step = job.compute + codec / job.every + exposed
        return Estimate(way, received / job.every if job.hosts > 1 else 0.0, transfer / job.every, exposed, step)
    exposed = max(transfer - job.backward * job.compute, last * stream + waits)
    return Estimate(way, received if job.hosts > 1 else 0.0, transfer, exposed, job.compute + codec + exposed)


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def number(text: str) -> int:
    """``110M``, ``1.3B``, ``25_000_000``, ``25,000,000`` -> a whole number."""
    cleaned = text.strip().lower().replace("_", "").replace("b", "g")
    if re.fullmatch(r"\d{1,3}(,\d{3})+", cleaned):
        cleaned = cleaned.replace(",", "")
    unit = cleaned[-1:] if cleaned[-1:].isalpha() else ""
    try:
        return round(float(cleaned.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigurationError(f"{text!r}: expected a number such as 25000000, 110M or 1.3B") from None


def rate(text: str) -> float:
    """``10gbit``, ``100Mbps`` (bits per second), ``1.2GB``, ``1.2GBps`` (bytes) -> bytes per second."""
    cleaned = text.strip().removesuffix("/s")
    lowered = cleaned.lower()
    for suffix, bits in (("Bps", 1), ("bit", 8), ("bps", 8), ("B", 1)):
        if (cleaned if "B" in suffix else lowered).endswith(suffix):
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
    steps = [{estimate.way: 1e3 * estimate.step for estimate in one.estimates} for one in plans]
    for way in dict.fromkeys(way for one in steps for way in one):
        known = [(n, one[way]) for n, one in zip(counts, steps, strict=True) if way in one]
        axes.plot(*zip(*known, strict=True), marker="o", label=way)
    axes.set(yscale="log", xlabel="workers", ylabel="milliseconds a step")
    axes.set_xscale("log", base=2)
    axes.legend()
    show.save(figure, path)
