"""Norms that do not depend on how many threads a worker has, to what they are rounded to; in float64, by pieces."""

from __future__ import annotations

import torch


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Of all elements, float64, of no dimension. Copies are of pieces, and small."""
    sums = [part.double().square().sum() for part in values.detach().reshape(-1).split(2**20)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def length(values: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm to 20 bits, as in ``rules.lamb``, float32, of no dimension."""
    mantissa, exponent = torch.frexp(sum_of_squares(values).sqrt())
    return torch.ldexp(torch.round(mantissa * 2**20), exponent - 20).to(torch.float32)
