"""The second moment as a plain optimizer needs it, which corrects the bias of both moments by one count of steps.

In a compressed run the second moment v has seen V steps and is frozen, and is corrected by 1 - beta2^V; the count T of
optimizer steps continues, and a plain optimizer corrects by 1 - beta2^T. ``state_dict()`` therefore has v times
(1 - beta2^T) / (1 - beta2^V). A resumed run gets back the very bits of v, because v has four bits to spare: they are
rounded off when it is frozen, 2^-20 of its value, and what multiplication and division add is less than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

VARIANCE_STEPS, VARIANCE_BETA2 = FROZEN_KEYS = ("onebit_variance_steps", "onebit_variance_beta2")
"""In the state of a parameter: how many steps its second moment has seen, where that is frozen, or a compressed step
was taken, and with which beta2, if it has one. They go wherever the state goes."""

COMMON_STEPS = "onebit_common_steps"
"""In the state of a parameter, with local steps and before its second moment is frozen: how many of the gradients that
this has seen were the workers' mean. It goes wherever the state goes, too."""

OWN_KEYS = {*FROZEN_KEYS, COMMON_STEPS}
"""What a plain optimizer knows nothing of."""

SPARE = 16  # units in the last place of a float32


def entries_of(state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """What an optimizer's ``state`` has of parameters: some keep other things in it, too, under other keys."""
    return [entries for entries in state.values() if isinstance(entries, dict)]


def coarsen(value: torch.Tensor) -> torch.Tensor:
    """Round ``value``, float32 and not negative, to multiples of ``SPARE`` units in the last place; in place."""
    value.view(torch.int32).add_(SPARE // 2).bitwise_and_(-SPARE)
    return value


def restored(value: torch.Tensor, factor: float) -> torch.Tensor:
    """v, of which ``value`` is ``factor`` times as much: the same bits if v was coarse. A new tensor."""
    return coarsen(value.float() / factor).to(value.dtype)


class _Mark:
    """A tensor, and what it was like: its version, its address, and its largest element, if it was in the host's memory
    and not empty."""

    __slots__ = ("address", "at", "probe", "tensor", "value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.address = tensor, tensor._version, tensor.data_ptr()
        self.at = _largest(tensor)
        self.probe = None if self.at is None else _element(tensor, self.at)
        self.value = None if self.probe is None else self.probe[0]

    def renew(self) -> bool:
        """The tensor is as it should be now; False if its memory was replaced (``value.data = ...``)."""
        if self.tensor.data_ptr() != self.address:
            return False
        self.version = self.tensor._version
        if self.probe is not None:
            self.value = self.probe[0]
        return True

    def differs(self) -> bool:
        """Whether the tensor is not what it was; it may be elsewhere."""
        if self.tensor._version != self.version:
            return True
        probe = self.probe
        if self.tensor.data_ptr() != self.address:  # the old memory may be gone
            probe = None if self.at is None else _element(self.tensor.cpu(), self.at)
            return self.at is not None and (probe is None or probe[0] != self.value)
        return probe is not None and probe[0] != self.value


class Marks:
    """What the tensors of a parameter's state, of some keys, were like when a step ended.

    Kernels write to them without PyTorch's knowledge, and so does ``.data``: one element is remembered as well, if it
    is in the host's memory.
    """

    def __init__(self, state: Mapping[str, Any], keys: Iterable[str]) -> None:
        self._marks = {key: _Mark(state[key]) for key in keys if isinstance(state.get(key), torch.Tensor)}

    def renew(self, state: Mapping[str, Any], keys: Collection[str]) -> bool:
        """They are as they should be now. False if ``state`` has others under ``keys``: then these marks are of no more
        use."""
        if self._marks.keys() != keys:
            return False
        return all(state.get(key) is mark.tensor and mark.renew() for key, mark in self._marks.items())

    def edited(self, state: Mapping[str, Any]) -> list[str]:
        """The keys of those that are not the tensors as they were."""
        return [key for key, mark in self._marks.items() if state.get(key) is not mark.tensor or mark.differs()]

    def moved(self, key: str, state: Mapping[str, Any]) -> bool:
        """Whether there is another tensor of the same values."""
        was = self._marks[key].tensor
        now: Any = state.get(key)
        same = isinstance(now, torch.Tensor) and now is not was and now.shape == was.shape
        return same and torch.equal(now.to(was), was) and key not in self.edited({key: was})


WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((extent,), (1,))


def _largest(tensor: torch.Tensor) -> int | None:
    """Where in its memory ``tensor`` has its largest element; None if there is nothing to look at."""
    seen = tensor.device.type == "cpu" and tensor.itemsize in WORDS and tensor.numel() > 0
    return int(_flat(tensor).abs().argmax()) if seen else None


def _element(tensor: torch.Tensor, at: int) -> memoryview | None:
    """The bits of the element ``at`` this place of the memory of ``tensor``, as long as that lives; None if there is no
    such element."""
    flat = _flat(tensor) if tensor.numel() and tensor.itemsize in WORDS else torch.empty(0)
    return flat[at : at + 1].view(WORDS[tensor.itemsize]).numpy().data if at < flat.numel() else None
