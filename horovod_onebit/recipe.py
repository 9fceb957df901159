"""Every choice of the method in one frozen value, validated when it is made.

Which preset to take: ``robust`` unless you reproduce a paper. The reasons and the measurements stand in the docs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Literal

from horovod_onebit.checks import finite, flag, one_of, whole
from horovod_onebit.codecs import find
from horovod_onebit.errors import ConfigurationError

Space = Literal["update", "momentum"]
Scale = Literal["rms", "guarded"]
OnNonfinite = Literal["skip", "raise"]
Bits = Literal["exact", "two_bit", "three_bit", "four_bit"]
WarmupName = Literal["auto", Bits]

GATHER_LIMIT = 2**31 - 2**20
"""Horovod counts gathered bytes with int32: one gather carries less than 2 GiB in total."""

BUCKET, GPU_BUCKET = 4 * 2**20, 16 * 2**20
"""Elements of a message. A GPU compresses as many while its host gets one message on its way."""

NOT_OF_RESIDUALS = {"server_codec", "warmup", "link", "on_nonfinite", "bucket_size"}
"""Options with which residuals do not change; how messages are cut, the layout knows."""


def exchanges() -> tuple[str, ...]:
    """``"auto"`` and the files of ``horovod_onebit.exchange``, which itself needs recipes."""
    package = find_spec("horovod_onebit.exchange")
    assert package is not None
    return ("auto", *sorted(module.name for module in iter_modules(package.submodule_search_locations)))


@dataclass(frozen=True)
class Recipe:
    """How gradients become bits. All workers must use the same one; a handshake checks it.

    Attributes:
        space: ``"update"`` compresses what will be added to the weights, momentum / D (ours); ``"momentum"``
            compresses the momentum and divides afterwards (Tang et al. 2021, Algorithm 1).
        scale: magnitude given to each sign: ``"rms"`` keeps the norm, ``"guarded"`` is rms bounded so that the error
            always shrinks.
        block_size: elements that share one scale, a positive multiple of 8; None is one scale per tensor.
        clip: bound on each element of the local update before the error is added, in update space only; None is
            no bound. It grows with the number of workers n as ``clip * sqrt(1 + 0.01 n)``, because the noise of a
            local update does.
        eps_inside_sqrt: ``D = sqrt(v + eps)`` (Tarasov and Ershov 2022) instead of ``sqrt(v) + eps``.
        exchange: how messages travel; ``"direct"`` is one allgather, and every worker decodes all messages;
            ``"two_stage"`` is Algorithm 1's server, each worker serving a share: its traffic does not grow with n;
            ``"hierarchical"`` is exact within a host, and direct or two-stage between hosts. ``"auto"`` is the one
            that costs least (``horovod-onebit plan`` shows what each costs).
        min_compressed_size: tensors with fewer elements travel uncompressed (norms, biases).
        bucket_size: elements per message, about; one message is one collective. None is ``BUCKET``, or ``GPU_BUCKET``
            where all workers compress on GPUs.
        on_nonfinite: what all workers do when one of them has NaN or Inf in its gradient: ``"skip"`` the step
            alike, or ``"raise"`` ``NonFiniteError`` alike.
        codec: what an element becomes: ``"sign"``, one bit, or ``"two_bit"``, four levels (see
            ``horovod_onebit.codecs``).
        server_codec: the same of what the servers of a two-stage exchange send. With ``"sign"``, that is the mean, and
            what compression loses is of the size of the whole update, however many workers there are: it shows in the
            loss. With more bits, it is the mean less what all workers know of it, their momentum, and hardly does
            (studies 4 and 8).
        warmup: how gradients travel in the warm-up: ``"exact"``, or, after ten exact steps, in ``"two_bit"``,
            ``"three_bit"`` or ``"four_bit"`` an element, in units of the root of its second moment
            (``rules.gradient``). Takes 8 to 12 bytes of memory a parameter while it lasts, where they are compressed.
            ``"auto"`` is ``"three_bit"``. A schedule has a ``warmup`` of its own, which this must not contradict:
            ``"auto"`` and ``"exact"`` stand for it there.
        link: what ``"auto"`` takes for the rate of a host's network interface, in bytes per second.
    """

    space: Space = "update"
    scale: Scale = "guarded"
    block_size: int | None = 1024
    clip: float | None = 3.0
    eps_inside_sqrt: bool = False
    exchange: str = "auto"
    min_compressed_size: int = 1024
    bucket_size: int | None = None
    on_nonfinite: OnNonfinite = "skip"
    codec: str = "sign"
    server_codec: str = "two_bit"
    warmup: WarmupName = "auto"
    link: float = 125e6

    def __post_init__(self) -> None:
        one_of("space", self.space, Space)
        one_of("scale", self.scale, Scale)
        find(self.codec), find(self.server_codec)
        one_of("warmup", self.warmup, WarmupName)
        one_of("exchange", self.exchange, exchanges())
        one_of("on_nonfinite", self.on_nonfinite, OnNonfinite)
        blocks = "None for one scale per tensor, or a multiple of 8 (so that blocks start on whole bytes)"
        if self.block_size is not None and whole("block_size", self.block_size, blocks, least=8) % 8:
            raise ConfigurationError(f"block_size={self.block_size!r}: expected {blocks}")
        flag("eps_inside_sqrt", self.eps_inside_sqrt)
        self._check_clip()
        whole("min_compressed_size", self.min_compressed_size, "a whole number of elements")
        if self.bucket_size is not None:
            whole("bucket_size", self.bucket_size, "a whole number of elements, or None")
        if not finite("link", self.link, "bytes a second") > 0:
            raise ConfigurationError(f"link={self.link}: expected a positive rate, in bytes a second")

    def _check_clip(self) -> None:
        if self.clip is None:
            return
        if isinstance(self.clip, bool) or not isinstance(self.clip, (int, float)) or not 0 < self.clip < math.inf:
            raise ConfigurationError(f"clip={self.clip!r}: expected a positive number, or None for no clip")
        if self.space == "momentum":
            raise ConfigurationError(
                f"clip={self.clip!r} bounds the update, and space='momentum' compresses the momentum: "
                "use space='update', or clip=None"
            )

    def signature(self) -> str:
        """What residuals depend on, as a text: the options that are not the defaults, so that it stays the same where
        new options come."""
        own = [field for field in dataclasses.fields(self) if field.name not in NOT_OF_RESIDUALS]
        return repr({field.name: value for field in own if (value := getattr(self, field.name)) != field.default})

    def bucket(self, *, on_gpus: bool = False) -> int:
        """Elements per message, about."""
        return self.bucket_size or (GPU_BUCKET if on_gpus else BUCKET)

    def clip_for(self, workers: int) -> float:
        """The bound on a local update when ``workers`` share the work (infinity without one)."""
        return math.inf if self.clip is None else self.clip * math.sqrt(1 + 0.01 * workers)

    def block_size_for(self, size: int) -> int:
        """The length of a scale's block in a tensor (or piece) of ``size`` elements."""
        return max(size, 1) if self.block_size is None else self.block_size


_MOMENTUM_SPACE = Recipe(
    space="momentum", scale="rms", block_size=None, clip=None, exchange="two_stage", server_codec="sign", warmup="exact"
)

PRESETS: dict[str, Recipe] = {
    "robust": Recipe(),
    "paper": _MOMENTUM_SPACE,
    "fixed": dataclasses.replace(_MOMENTUM_SPACE, eps_inside_sqrt=True),
}
"""By name. ``robust`` is ours, the default. ``paper`` is 1-bit Adam as DeepSpeed codes it (Tang et al. 2021), one rms
scale per tensor. ``fixed`` is the same with epsilon under the root (Tarasov and Ershov 2022)."""


def resolve(recipe: str | Recipe) -> Recipe:
    """A preset by its name, or the recipe itself."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in PRESETS:
        return PRESETS[recipe]
    raise ConfigurationError(
        f"recipe={recipe!r}: expected one of {', '.join(map(repr, PRESETS))}, a horovod_onebit.Recipe, or 'exact', "
        "which DistributedOptimizer and NumpyOptimizer take"
    )
