"""How the workers of the PyTorch face reach each other: Horovod, or ``torch.distributed``.

``choose`` says which; ``horovod.py`` and ``distributed.py`` hold one each, and nothing else of this face names them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib import import_module
from typing import Any, Protocol

import torch

from horovod_onebit.errors import ConfigurationError
from horovod_onebit.exchange import Collectives, Lane
from horovod_onebit.tasks import Handle


class Op(IntEnum):
    """What becomes of the workers' gradients. The numbers are those of Horovod's own constants."""

    Average = 0
    Sum = 1


Average, Sum = Op.Average, Op.Sum


class NoneCompressor:
    """Exact means travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """``tensor``, and nothing that ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """``tensor``."""
        return tensor


class FP16Compressor:
    """Exact means travel as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """``tensor`` as float16 if it is of floating point, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """``tensor`` in the dtype ``context``."""
        return tensor.to(context)


class Compression:
    """What becomes of exact means on their way; Horovod's ``Compression`` is accepted, too."""

    none = NoneCompressor
    fp16 = FP16Compressor


class Transport(Protocol):
    """A group of workers that train together.

    Attributes:
        number: 0 is the whole world; the same on all workers of the group.
        ranks: its workers, as ranks of the world.
        included: whether this worker is one of them.
        size: of the group.
        world: this worker's rank in the world, and the size of that.
        in_order: collectives are paired by the order of calls, and not by name. What is started before the workers
            have agreed is then held (``tasks.Held``), but for what travels in a ``lane``, and exact means are fused.
    """

    in_order: bool

    @property
    def number(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def included(self) -> bool: ...

    @property
    def size(self) -> int: ...

    @property
    def world(self) -> tuple[int, int]: ...

    @property
    def ends_together(self) -> bool:
        """Whether a process that ends now ends the others', too."""
        ...

    def collectives(self) -> Collectives:
        """For messages."""
        ...

    def lane(self) -> Lane | None:
        """For messages or exact means of one optimizer, if they may leave before the workers have agreed only there."""
        ...

    def agreement(self) -> Collectives:
        """For the agreements, which are not kept waiting by messages that other workers do not send."""
        ...

    def allreduce(
        self, tensor: torch.Tensor, name: str, *, in_place: bool, lane: Any = None, **reduction: Any
    ) -> Handle:
        """Start to reduce ``tensor`` as ``face.Arguments.reduction`` says, in a ``lane()`` if one is given; ``wait``
        gives a tensor."""
        ...

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: str) -> Handle:
        """Start to give ``tensor`` the values of ``root_rank``, a rank of the world: flat, uint8 or int32."""
        ...

    def broadcast_object(self, value: Any, root_rank: int, name: str) -> Any:
        """The ``value`` of ``root_rank``, a rank of the world. Collective."""
        ...

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """The values of all workers of the group, by rank. Collective."""
        ...


def choose(process_set: Any = None, process_group: Any = None, *, call: str) -> Transport:
    """The workers that ``call`` is for: those of ``process_set`` over Horovod, or of ``process_group`` over
    ``torch.distributed``; if both are None, all workers, over what is initialised.

    Raises ``ConfigurationError`` if both arguments are given, if neither or both of Horovod and ``torch.distributed``
    are initialised, or for an argument of another kind.
    """
    if process_set is not None and process_group is not None:
        raise ConfigurationError(
            f"process_set={process_set!r} and process_group={process_group!r}: expected one of them. process_set is "
            "for Horovod, process_group for torch.distributed"
        )
    found: Transport
    if process_group is not None or (process_set is None and _over_torch(call)):
        found = import_module("horovod_onebit.torch.distributed").of(process_group)
        return found
    try:
        transport = import_module("horovod_onebit.torch.horovod")
        import_module("horovod_onebit.torch.elastic")  # Horovod's own elastic state must know these optimizers
    except ImportError as error:
        raise ConfigurationError(
            f"process_set={process_set!r}, and Horovod cannot be imported ({error}): leave it out, and call "
            "torch.distributed.init_process_group() first, in a job of torchrun"
        ) from error
    found = transport.of(process_set, call)
    return found


def _over_torch(call: str) -> bool:
    """Whether ``torch.distributed`` is initialised, and Horovod is not. Raises if neither is, or both are."""
    hvd = sys.modules.get("horovod.torch")  # who has initialised it has imported it
    over_horovod = hvd is not None and bool(hvd.is_initialized())
    over_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
    if over_horovod and over_torch:
        raise ConfigurationError(
            "Horovod and torch.distributed are both initialised: choose one by an argument, "
            f"{call}(..., process_set=hvd.global_process_set) or "
            f"{call}(..., process_group=torch.distributed.group.WORLD)"
        )
    if not over_horovod and not over_torch:
        raise ConfigurationError(
            f"call hvd.init() before {call} in a job of horovodrun, or torch.distributed.init_process_group() in a job "
            "of torchrun"
        )
    return over_torch
