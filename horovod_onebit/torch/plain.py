"""The second moment as a plain optimizer needs it, which corrects the bias of both moments by one count of steps.

In a compressed run the second moment v has seen V steps and is frozen, and is corrected by 1 - beta2^V; the count T of
optimizer steps continues, and a plain optimizer corrects by 1 - beta2^T. ``state_dict()`` therefore has v times
(1 - beta2^T) / (1 - beta2^V). A resumed run gets back the very bits of v, because v has four bits to spare: they are
rounded off when it is frozen, 2^-20 of its value, and what multiplication and division add is less than that.
"""

from __future__ import annotations

import torch

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
