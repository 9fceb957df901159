"""``OnebitAdam``, ``OnebitLamb`` and ``ZeroOneAdam``, with the argument names of DeepSpeed's optimizers.

Each builds the plain optimizer and wraps it in ``DistributedOptimizer``, whose own arguments they take as well
(``named_parameters``, ``recipe``, ``process_set``, ...). What DeepSpeed accepts and ignores is refused here. The three
``factor_`` arguments of ``OnebitLamb`` are accepted and have no effect: see ``LAMB``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.recipe import Bits, Recipe, resolve
from horovod_onebit.schedule import ZeroOne
from horovod_onebit.torch.lamb import LAMB
from horovod_onebit.torch.optimizer import DistributedOptimizer


def OnebitAdam(
    params: Any,
    lr: float = 1e-3,
    freeze_step: int | float | str | None = None,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    amsgrad: bool = False,
    *,
    recipe: str | Recipe = "robust",
    **horovod: Any,
) -> Any:
    """1-bit Adam: ``torch.optim.AdamW``, compressed after ``freeze_step`` steps. Weight decay is decoupled.

    Args:
        params: as for any ``torch.optim`` optimizer.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; ``weight_decay`` is 0 by default (AdamW: 0.01).
        freeze_step: ``warmup_steps`` of ``DistributedOptimizer``, ``"auto"`` by default, None with a ``schedule``.
            (DeepSpeed's default is 100,000 steps.)
        eps_inside_sqrt: divide by ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.
        bias_correction, max_grad_norm, amsgrad: refused unless they are the defaults.
        recipe: as in ``DistributedOptimizer``.
        horovod: all other arguments of ``DistributedOptimizer``, such as ``named_parameters``.
    """
    _refuse(bias_correction=bias_correction, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
    plain = torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return DistributedOptimizer(plain, warmup_steps=freeze_step, recipe=_recipe(recipe, eps_inside_sqrt), **horovod)


def OnebitLamb(
    params: Any,
    lr: float = 1e-3,
    freeze_step: int | float | str | None = None,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    *,
    recipe: str | Recipe = "robust",
    **horovod: Any,
) -> Any:
    """1-bit LAMB: this package's ``LAMB``, compressed after ``freeze_step`` steps.

    Args:
        params: as for any ``torch.optim`` optimizer.
        lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff, coeff_beta: as in ``LAMB``; ``eps`` is
            1e-8 by default (``LAMB``: 1e-6).
        freeze_step: ``warmup_steps`` of ``DistributedOptimizer``, ``"auto"`` by default, None with a ``schedule``.
            (DeepSpeed's default is 100,000 steps.)
        eps_inside_sqrt: divide by ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.
        max_grad_norm, amsgrad: refused unless they are the defaults.
        factor_max, factor_min, factor_threshold: no effect, since the coefficient is not frozen here.
        recipe: as in ``DistributedOptimizer``.
        horovod: all other arguments of ``DistributedOptimizer``, such as ``named_parameters``.
    """
    _refuse(max_grad_norm=max_grad_norm, amsgrad=amsgrad)
    plain = LAMB(
        params, lr, betas, eps, weight_decay, bias_correction=bias_correction, min_coeff=min_coeff, max_coeff=max_coeff,
        coeff_beta=coeff_beta, factor_min=factor_min, factor_max=factor_max, factor_threshold=factor_threshold,
    )  # fmt: skip
    return DistributedOptimizer(plain, warmup_steps=freeze_step, recipe=_recipe(recipe, eps_inside_sqrt), **horovod)


def ZeroOneAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    var_freeze_step: int = 100_000,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 16,
    amsgrad: bool = False,
    *,
    recipe: str | Recipe = "robust",
    warmup: Bits = "exact",
    **horovod: Any,
) -> Any:
    """0/1 Adam: ``torch.optim.AdamW`` with ``schedule=ZeroOne(...)``. Weight decay is decoupled.

    Args:
        params: as for any ``torch.optim`` optimizer.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; ``weight_decay`` is 0 by default (AdamW: 0.01).
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: as in ``ZeroOne``.
        eps_inside_sqrt: divide by ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.
        bias_correction, max_grad_norm, amsgrad: refused unless they are the defaults.
        recipe: ``"robust"``, ``"paper"``, ``"fixed"``, or a ``Recipe``.
        warmup: as in ``ZeroOne``: how the gradients of its exact steps are sent.
        horovod: all other arguments of ``DistributedOptimizer``, such as ``named_parameters``.
    """
    _refuse(bias_correction=bias_correction, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
    plain = torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    schedule = ZeroOne(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper, warmup=warmup)
    return DistributedOptimizer(plain, schedule=schedule, recipe=_recipe(recipe, eps_inside_sqrt), **horovod)


def _refuse(*, bias_correction: bool = True, max_grad_norm: float = 0.0, amsgrad: bool = False) -> None:
    if not bias_correction:
        raise UnsupportedError("bias_correction=False: Adam corrects its bias here (DeepSpeed ignores the argument)")
    if max_grad_norm:
        raise UnsupportedError(
            f"max_grad_norm={max_grad_norm} (which DeepSpeed ignores): call optimizer.clip_grad_norm_(max_norm) "
            "between backward() and step()"
        )
    if amsgrad:
        raise UnsupportedError("amsgrad=True has no 1-bit form: leave it out")


def _recipe(recipe: str | Recipe, eps_inside_sqrt: bool) -> str | Recipe:
    if eps_inside_sqrt and recipe == "exact":
        raise UnsupportedError(
            "eps_inside_sqrt=True is of steps in one bit, and recipe='exact' has none: leave one out"
        )
    return dataclasses.replace(resolve(recipe), eps_inside_sqrt=True) if eps_inside_sqrt else recipe
