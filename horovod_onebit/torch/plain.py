"""The second moment as a plain optimizer needs it, which corrects the bias of both moments by one count of steps.

In a compressed run the second moment v has seen V steps and is frozen, and is corrected by 1 - beta2^V; the count T of
optimizer steps continues, and a plain optimizer corrects by 1 - beta2^T. ``state_dict()`` therefore has v times
(1 - beta2^T) / (1 - beta2^V). A resumed run gets back the very bits of v, because v has four bits to spare: they are
rounded off when it is frozen, 2^-20 of its value, and what multiplication and division add is less than that.
"""

from __future__ import annotations

from typing import Any

import torch

VARIANCE_STEPS = "onebit_variance_steps"
"""In the state of a parameter: how many steps its second moment has seen, where that is frozen, or a compressed step
was taken. It goes wherever the state goes."""

SPARE = 16  # units in the last place of a float32


def coarsen(value: torch.Tensor) -> torch.Tensor:
    """Round ``value``, float32 and not negative, to multiples of ``SPARE`` units in the last place; in place."""
    value.view(torch.int32).add_(SPARE // 2).bitwise_and_(-SPARE)
    return value


def factor(beta2: float, taken: int, seen: int) -> float:
    """What v, of which ``seen`` steps are known, is multiplied by for an optimizer that counts ``taken`` steps."""
    return 1.0 if taken == seen else (1 - beta2**taken) / (1 - beta2**seen)


def restored(value: torch.Tensor, factor: float) -> torch.Tensor:
    """v, of which ``value`` is ``factor`` times as much: the same bits if v was coarse. A new tensor."""
    return coarsen(value.float() / factor).to(value.dtype)


class Mark:
    """What a tensor of an optimizer's state was like when a step ended.

    Kernels write to it without PyTorch's knowledge, and so does ``.data``: one element is remembered as well, if it is
    in the host's memory.
    """

    __slots__ = ("_probe", "_tensor", "_value", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._probe = _probe(tensor)
        self.renew()

    def is_of(self, tensor: Any) -> bool:
        """Whether it is of this very ``tensor``."""
        return tensor is self._tensor

    def renew(self) -> None:
        """It is as it should be now."""
        self._version = self._tensor._version
        self._value = None if self._probe is None else self._probe[0]

    def moved(self, now: Any) -> bool:
        """Whether ``now`` is another tensor of the same values."""
        same = isinstance(now, torch.Tensor) and now is not self._tensor and now.shape == self._tensor.shape
        return same and torch.equal(now.to(self._tensor), self._tensor) and not self.edited(self._tensor)

    def edited(self, now: Any) -> bool:
        """Whether ``now`` is not the tensor as it was."""
        if now is not self._tensor or now._version != self._version:
            return True
        return self._probe is not None and self._probe[0] != self._value


def _probe(tensor: torch.Tensor) -> memoryview | None:
    """The bits of the largest element of ``tensor``, as long as it lives; None if there is nothing to look at."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    if tensor.device.type != "cpu" or words is None or not tensor.numel():
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((extent,), (1,))
    largest = int(flat.abs().argmax())
    return flat[largest : largest + 1].view(words).numpy().data
