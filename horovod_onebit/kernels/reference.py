"""The kernels in NumPy: the specification that every faster backend is tested against.

Arrays are flat float32 of one length ``d`` (one tensor, or a piece of one that starts on a block boundary)
unless said otherwise. A *block* is ``block_size`` neighbours that share one scale; the last one may be
shorter. Bits are packed little-endian, ``ceil(d / 8)`` bytes; bit 1 means negative, and ``sign(0) = +1``.

Elementwise arithmetic is float32, operation by operation, in the order written here, so that other backends
can reproduce the bits exactly; sums are float64, so that no finite input overflows or vanishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]  # float32 in use; float64 here serves tests of the identities
Bytes = NDArray[np.uint8]
ScaleName = Literal["rms", "guarded"]

TINY = np.float32(np.finfo(np.float32).tiny)
GUARD = 1.5
CHUNK = 16_384
"""Elements whose squares ``squares`` adds up apart, so that sums do not depend on the number of threads."""


class Spec(NamedTuple):
    """The scalars of one compression: ``u = (momentum_factor * m + grad_factor * (g + l2 * w)) / D``.

    In update space ``D = sqrt(v * variance_correction) + eps``, or ``sqrt(v * variance_correction + eps)`` with
    ``eps_inside_sqrt``, and ``u`` is clipped to ``[-clip, clip]``; in momentum space there is no division and no
    clip (``variance`` is then None where it is asked for).
    """

    momentum_factor: float
    grad_factor: float
    l2: float
    eps: float
    eps_inside_sqrt: bool
    variance_correction: float
    clip: float
    scale: ScaleName
    block_size: int


@contextmanager
def batch() -> Iterator[None]:
    """Calls within do not depend on each other, and their results are there at its end: for those who launch."""
    yield


def twin(size: int) -> Any:
    """A message of ``size`` bytes for tensors that lie elsewhere, which arrives some time after it was encoded.

    Its attributes are those of ``cuda.twin.Twin``; None where tensors lie in host memory.
    """
    return None


def host(array: Array) -> Array:
    """``array`` in host memory, for reading: itself, or a copy of what lies elsewhere."""
    return array


def write(array: Array, values: Array | float) -> None:
    """Put ``values``, which lie in host memory, into ``array``, which may lie elsewhere."""
    array[:] = values


def copy(source: Array, target: Array) -> None:
    """Put ``source`` into ``target``, which lies in the same memory."""
    target[:] = source


def num_blocks(size: int, block_size: int) -> int:
    """How many scales ``size`` elements need."""
    return -(-size // block_size)


def num_bytes(size: int) -> int:
    """How many bytes hold one bit for each of ``size`` elements."""
    return -(-size // 8)


def scale_of(block: Array, scale: ScaleName) -> np.float32:
    """The scale of one non-empty block (MATH: the 1-bit codec).

    ``rms`` keeps the norm, ``guarded`` is ``rms`` bounded so that the codec is always a contraction
    (``s < 2 * mean_abs`` is exactly the condition ``|x - C(x)| < |x|``).
    """
    wide = block.astype(np.float64)
    mean_abs = np.abs(wide).sum() / wide.size
    rms = np.sqrt((wide * wide).sum() / wide.size)
    return np.float32(rms if scale == "rms" else min(rms, GUARD * mean_abs))


def pack_signs(x: Array) -> Bytes:
    """One bit per element, 1 where ``x < 0`` (so NaN and both zeros give 0); padding bits are 0."""
    return np.packbits(x < 0, bitorder="little")


def unpack_signs(bits: Bytes, size: int) -> Array:
    """The signs, +1 or -1, of the first ``size`` bits."""
    negative = np.unpackbits(bits, count=size, bitorder="little").astype(bool)
    return np.where(negative, np.float32(-1), np.float32(1))


def denominator(variance: Array, spec: Spec) -> Array:
    """``D``: what Adam divides by, with the bias of ``variance`` corrected. Never zero."""
    corrected = variance * np.float32(spec.variance_correction)
    if spec.eps_inside_sqrt:
        return np.maximum(np.sqrt(corrected + np.float32(spec.eps)), TINY)
    return np.maximum(np.sqrt(corrected) + np.float32(spec.eps), TINY)


def contribution(grad: Array, momentum: Array, variance: Array | None, weight: Array | None, spec: Spec) -> Array:
    """``u``: what this worker would send if nothing were compressed and nothing were owed.

    NaN wherever the input is NaN or infinite, so that the clip cannot hide it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        g = grad if weight is None else grad + np.float32(spec.l2) * weight
        m = np.float32(spec.momentum_factor) * momentum + np.float32(spec.grad_factor) * g
        if variance is None:
            return m
        u = m / denominator(variance, spec)
        u = np.minimum(np.maximum(u, np.float32(-spec.clip)), np.float32(spec.clip))
        return u + m * np.float32(0)


def encode(
    grad: Array,
    momentum: Array,
    variance: Array | None,
    weight: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
) -> bool:
    """Compress ``c = u + error`` to ``scales`` and ``bits``, and keep in ``error`` what was lost.

    ``variance`` None means momentum space; ``weight`` None means no L2 term. Writes ``error`` (d), ``scales``
    (one a block) and ``bits`` in place. A block that holds anything not finite gets the scale NaN and its error
    stays as it was. Returns whether every block was finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        c = contribution(grad, momentum, variance, weight, spec) + error + np.float32(0)
    return _compress(c, error, scales, bits, spec.scale, spec.block_size)


def _compress(c: Array, error: Array, scales: Array, bits: Bytes, scale: ScaleName, block_size: int) -> bool:
    bits[:] = pack_signs(c)
    finite = True
    for k in range(num_blocks(c.size, block_size)):
        block = slice(k * block_size, min((k + 1) * block_size, c.size))
        if not np.isfinite(c[block]).all():
            scales[k] = np.nan
            finite = False
            continue
        scales[k] = s = scale_of(c[block], scale)
        error[block] = c[block] - np.where(c[block] < 0, -s, s)
    return finite


def restore(
    grad: Array,
    momentum: Array,
    variance: Array | None,
    weight: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
) -> None:
    """Undo ``encode`` of the same arguments, for a step that the workers agreed to skip.

    ``error`` comes back to rounding (a unit in the last place of ``c``); blocks that ``encode`` left alone are
    left alone here too.
    """
    _take_back(contribution(grad, momentum, variance, weight, spec), error, scales, bits, spec.block_size)


def _take_back(u: Array, error: Array, scales: Array, bits: Bytes, block_size: int) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        sent = unpack_signs(bits, error.size) * per_element(scales, error.size, block_size)
        before = (error + sent) - u
    untouched = np.isnan(sent)
    error[~untouched] = before[~untouched]


def per_element(scales: Array, size: int, block_size: int) -> Array:
    """``scales`` (one a block) repeated so that every element has its own."""
    return np.repeat(scales, block_size)[:size] if block_size < size else np.repeat(scales, size)[:size]


def decode_mean(scales: Array, bits: Bytes, size: int, block_size: int) -> Array:
    """The mean of the workers' messages: ``scales`` (n, blocks), ``bits`` (n, bytes) -> (size,).

    Each scale is divided by n first; the sum then runs over the workers in rank order, so that every replica
    rounds alike.
    """
    total: Array = np.zeros(size, np.float32)
    n = np.float32(len(scales))
    for worker_scales, worker_bits in zip(scales, bits, strict=True):
        share = worker_scales / n
        total = total + unpack_signs(worker_bits, size) * per_element(share, size, block_size)
    return total


def recode(
    scales: Array,
    bits: Bytes,
    error: Array,
    new_error: Array,
    scales_out: Array,
    bits_out: Bytes,
    scale: ScaleName,
    block_size: int,
) -> None:
    """A server's work: compress ``mean of the workers + error`` and leave what was lost in ``new_error``.

    ``scales`` (n, blocks) and ``bits`` (n, bytes) are the workers'; writes ``scales_out`` (blocks,), ``bits_out``
    (bytes,) and ``new_error`` (d,).
    """
    c = decode_mean(scales, bits, error.size, block_size) + error + np.float32(0)
    _compress(c, new_error, scales_out, bits_out, scale, block_size)


def apply(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array | None,
    weight: Array,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float = 1.0,
    look_back: float = 0.0,
) -> None:
    """Decode the workers' mean and take one step with it, in place on ``momentum`` and ``weight``.

    Update space: ``U = mean; w <- decay * w - step_size * U; m <- U * D``. Momentum space: ``m <- mean;
    w <- decay * w - step_size * m / D``. ``decay`` is ``1 - lr * weight_decay`` for decoupled decay. ``variance``
    None means ``D = 1`` (SGD); then ``w += look_back * m_before`` as well, which Nesterov's momentum needs.
    """
    mean = decode_mean(scales, bits, weight.size, spec.block_size)
    decayed = np.float32(decay) * weight
    if variance is None:
        decayed = decayed + np.float32(look_back) * momentum
        after, update = mean, mean
    elif update_space:
        after, update = mean * denominator(variance, spec), mean
    else:
        after, update = mean, mean / denominator(variance, spec)
    momentum[:] = after
    weight[:] = decayed - np.float32(step_size) * update


def squares(momentum: Array, variance: Array, weight: Array, out: NDArray[np.float64], spec: Spec) -> None:
    """Sums of squares of ``weight`` and of LAMB's update ``m / D * momentum_factor + l2 * w``, chunk by chunk.

    Of ``spec`` these two and the denominator count. Writes ``out`` (ceil(d / CHUNK), 2) float64.
    """
    update = _layer_update(momentum, variance, weight, spec)
    for k in range(len(out)):
        for j, x in enumerate((weight, update)):
            out[k, j] = np.square(x[k * CHUNK : (k + 1) * CHUNK], dtype=np.float64).sum()


def move(momentum: Array, variance: Array, weight: Array, spec: Spec, *, step_size: float, decay: float) -> None:
    """LAMB's step, in place: ``w <- decay * w - step_size * update``, the update as in ``squares``."""
    update = _layer_update(momentum, variance, weight, spec)
    weight[:] = np.float32(decay) * weight - np.float32(step_size) * update


def _layer_update(momentum: Array, variance: Array, weight: Array, spec: Spec) -> Array:
    adam = momentum / denominator(variance, spec) * np.float32(spec.momentum_factor)
    return adam + np.float32(spec.l2) * weight


# 0/1 Adam: see ``rules.zero_one_adam``.


def local_step(
    grad: Array,
    momentum: Array,
    variance: Array,
    weight: Array,
    spec: Spec,
    *,
    step_size: float,
    decay: float,
) -> None:
    """Adam's step by this worker's own gradient, in place on ``momentum`` and ``weight``, each element bounded.

    ``m <- momentum_factor * m + grad_factor * (g + l2 * w); w <- decay * w - step_size * clip(m / D)``.
    """
    momentum[:] = contribution(grad, momentum, None, weight, spec)
    with np.errstate(invalid="ignore", over="ignore"):
        update = momentum / denominator(variance, spec)
        update = np.minimum(np.maximum(update, np.float32(-spec.clip)), np.float32(spec.clip))
        weight[:] = np.float32(decay) * weight - np.float32(step_size) * update


def displacement(weight: Array, anchor: Array, variance: Array | None, spec: Spec, decay: float) -> Array:
    """How far local steps have moved ``weight`` from ``decay * anchor``; times ``D`` unless ``variance`` is None."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved = weight - np.float32(decay) * anchor
        return moved if variance is None else moved * denominator(variance, spec)


def encode_moved(
    weight: Array,
    anchor: Array,
    variance: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
    *,
    decay: float,
) -> bool:
    """As ``encode``, of the ``displacement``."""
    with np.errstate(invalid="ignore", over="ignore"):
        c = displacement(weight, anchor, variance, spec, decay) + error + np.float32(0)
    return _compress(c, error, scales, bits, spec.scale, spec.block_size)


def restore_moved(
    weight: Array,
    anchor: Array,
    variance: Array | None,
    error: Array,
    scales: Array,
    bits: Bytes,
    spec: Spec,
    *,
    decay: float,
) -> None:
    """As ``restore``, of ``encode_moved``."""
    _take_back(displacement(weight, anchor, variance, spec, decay), error, scales, bits, spec.block_size)


def apply_gradient(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array,
    weight: Array,
    spec: Spec,
    *,
    update_space: bool,
    step_size: float,
    decay: float,
) -> None:
    """Adam's step by the mean of gradients, in place: ``m <- momentum_factor * m + grad_factor * mean``.

    In update space the mean is of ``g / D``, and is multiplied by ``D`` first. ``w <- decay * w - step_size * m / D``.
    """
    mean, d = decode_mean(scales, bits, weight.size, spec.block_size), denominator(variance, spec)
    gradient = mean * d if update_space else mean
    momentum[:] = np.float32(spec.momentum_factor) * momentum + np.float32(spec.grad_factor) * gradient
    weight[:] = np.float32(decay) * weight - np.float32(step_size) * (momentum / d)


def take_over(
    scales: Array,
    bits: Bytes,
    momentum: Array,
    variance: Array,
    weight: Array,
    anchor: Array,
    spec: Spec,
    *,
    update_space: bool,
    decay: float,
    rates: float,
) -> None:
    """Go where all workers' local steps lead in the mean: ``w <- decay * anchor + mean; m <- -mean * D / rates``.

    In momentum space the mean is of displacements times ``D``, and is divided by it first. ``rates`` is the sum of the
    local steps' sizes; with none, the momentum stays.
    """
    mean, d = decode_mean(scales, bits, weight.size, spec.block_size), denominator(variance, spec)
    moved = mean if update_space else mean / d
    weight[:] = np.float32(decay) * anchor + moved
    if rates > 0:
        momentum[:] = moved * d / -np.float32(rates)
