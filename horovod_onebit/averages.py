"""Exact means over the workers, of many arrays in one allreduce (of float16 values: in one alltoall)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from horovod_onebit.exchange import Collectives
from horovod_onebit.kernels.reference import Array, num_blocks
from horovod_onebit.stats import Traffic, allreduce_bytes
from horovod_onebit.tasks import Task, start

TOGETHER = 2**26
"""Elements that travel together, at most: collectives count them in 32 bits."""


def start_mean(arrays: Sequence[Array], collectives: Collectives, name: str, traffic: Traffic) -> Task[list[Array]]:
    """Start to add up ``arrays``, float32 of any shapes, which are the same on all workers; these have agreed.

    The task that is returned waits; it gives the means over the workers, in the shapes of ``arrays``. Collective.
    """
    if not arrays:
        return _nothing()
    fused = np.concatenate([array.reshape(-1) for array in arrays])
    parts = np.split(fused, range(TOGETHER, fused.size, TOGETHER))
    handles = [collectives.allreduce(part, f"{name}.{i}" if i else name) for i, part in enumerate(parts)]
    for handle in handles:
        start(handle)
    sent = allreduce_bytes(fused.nbytes, collectives.size)
    traffic.add(sent, sent)

    def arrive() -> Task[list[Array]]:
        sums = list[Array]()
        for handle in handles:
            sums.append((yield handle))
        total = sums[0] if len(sums) == 1 else np.concatenate(sums)
        return _cut(total / np.float32(collectives.size), arrays)

    return arrive()


def _nothing() -> Task[list[Array]]:
    yield from ()
    return []


def start_half_mean(
    arrays: Sequence[Array], collectives: Collectives, name: str, traffic: Traffic
) -> Task[list[Array]]:
    """Like ``start_mean``, but the numbers travel as float16, half the bytes: each worker adds up a share of them in
    float32 and sends its mean to all. They are rounded twice, and infinite beyond float16's range."""
    if not arrays:
        return _nothing()
    size, n = sum(array.size for array in arrays), collectives.size
    share = min(TOGETHER // n, num_blocks(max(1, size), n))
    halves = np.zeros((num_blocks(max(1, size), n * share), n * share), np.float16)
    with np.errstate(over="ignore"):
        np.concatenate([array.reshape(-1) for array in arrays], out=halves.reshape(-1)[:size], casting="same_kind")
    waiting = [collectives.alltoall(row.view(np.uint8), f"{name}.{i}.scatter") for i, row in enumerate(halves)]
    for handle in waiting:
        start(handle)
    traffic.add(allreduce_bytes(halves.nbytes, n), allreduce_bytes(4 * size, n))

    def arrive() -> Task[list[Array]]:
        for i in range(len(waiting)):
            of_workers = (yield waiting[i]).view(np.float16).reshape(n, share)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = (of_workers.sum(axis=0, dtype=np.float32) / np.float32(n)).astype(np.float16)
            waiting[i] = collectives.allgather(mean.view(np.uint8), f"{name}.{i}.gather")
            start(waiting[i])
        means = np.empty(halves.shape, np.float32)
        for i, handle in enumerate(waiting):
            means[i] = (yield handle).view(np.float16)
        return _cut(means.reshape(-1)[:size], arrays)

    return arrive()


def _cut(flat: Array, arrays: Sequence[Array]) -> list[Array]:
    """What ``flat`` has of each of ``arrays``, in their shapes."""
    parts = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def second_moments(
    variances: Sequence[Array],
    gradients: Sequence[Array],
    own: Sequence[float],
    block_size: Callable[[int], int],
    collectives: Collectives,
    name: str,
    traffic: Traffic,
) -> Task[list[Array]]:
    """The second moments of the workers' mean gradient, from this worker's own. Collective; 8 bytes an element travel.

    ``variances`` are moving averages, their bias corrected, of the squares of gradients of which ``gradients`` are the
    last, flat float32, of the same shapes on all workers. Of each, the share ``own`` of the weights, from 0 to 1, is on
    this worker's own gradients (see ``own_share``); what was there before was of the mean gradient already, as after
    training with exact steps.

    In each block of ``block_size(elements)``, r is the power of the mean gradient over the workers' mean power of
    theirs, now, which is between 1 (all have the same) and 1/n (all is noise). If the power of the mean gradient has
    always been P, the variances are (1 - own) P + own P / r: what is returned is P, from their mean over the workers.
    In a block without a gradient now, as of rows of an embedding, r is that of all blocks that have one.
    """
    found = []
    for number, (variance, gradient, share) in enumerate(zip(variances, gradients, own, strict=True)):
        block = block_size(gradient.size)
        sent = [variance, gradient, _powers(gradient, block), np.array([share], np.float32)]
        mean, of_all, power, part = yield from start_mean(sent, collectives, f"{name}.{number}", traffic)
        known = (power > 0) & np.isfinite(power)
        signal, known_power = _powers(of_all, block), float(power[known].sum(dtype=np.float64))
        rest = float(signal[known].sum(dtype=np.float64)) / known_power if known_power > 0 else 1.0
        ratio = np.divide(signal, power, out=np.full_like(power, rest), where=known)
        ratio = np.clip(ratio, np.float32(1 / collectives.size), np.float32(1))
        ratio = np.asarray(ratio / (part + (1 - part) * ratio), np.float32)
        found.append(mean * np.repeat(ratio, block)[: mean.size])
    return found


def own_share(beta2: float, own: int, steps: int) -> float:
    """The weight of the last ``own`` gradients in a moving average of all ``steps``, whose bias is corrected."""
    return (1 - beta2 ** min(own, steps)) / (1 - beta2**steps) if 0 < own < steps else float(own > 0 or steps == 0)


def _powers(gradient: Array, block: int) -> Array:
    """The sum of squares of each block."""
    squares = np.square(gradient, dtype=np.float64)
    with np.errstate(over="ignore"):
        return np.add.reduceat(squares, np.arange(0, squares.size, block)).astype(np.float32)


def mean_norms(squares: Array, collectives: Collectives, name: str) -> Task[Array]:
    """The root mean square, over the workers, of norms whose ``squares`` this worker has, (k,). Collective.

    ``squares`` are float32, or float64 where ``collectives`` can sum it (Horovod's for PyTorch, MPI's).

    Clipping after the warm-up goes by it: the norm of the averaged gradient is not known to anybody, and this one is
    not smaller.
    """
    return np.sqrt((yield collectives.allreduce(squares, name)) / collectives.size)


def all_finite(arrays: Iterable[Array]) -> bool:
    """Whether every element of ``arrays`` is finite."""
    return all(bool(np.isfinite(array).all()) for array in arrays)
