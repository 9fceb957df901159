"""LAMB for PyTorch, which has none: uncompressed, on its own or inside ``DistributedOptimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod_onebit.checks import number
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.torch.norms import length


class LAMB(torch.optim.Optimizer):
    """Adam whose update is scaled, tensor by tensor, to the length of the weights (You et al. 2020, Algorithm 2).

    Args:
        params: as for any ``torch.optim`` optimizer.
        lr, betas, eps: as in ``torch.optim.Adam``; ``eps`` is 1e-6 by default (Adam: 1e-8).
        weight_decay: part of the update, so that it counts in its length.
        bias_correction: False leaves both moments uncorrected, as DeepSpeed does.
        min_coeff, max_coeff: bounds on the scaling coefficient ``|w| / |update|``.
        coeff_beta: decay of the mean of the coefficients, below which those of compressed steps do not fall.
        factor_min, factor_max, factor_threshold: accepted, because DeepSpeed's ``OnebitLamb`` has them, and without
            effect. There they bound how far the mean coefficient of the warm-up is changed in compressed steps; here
            each compressed step computes its coefficient.
        maximize: climb instead of descending.

    The names are DeepSpeed's. State by parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` as Adam's, and ``layer``, one
    float32 number, the mean of the coefficients.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        maximize: bool = False,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "coeff_beta": coeff_beta}
        for name, value in numbers.items():
            number(name, value)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigurationError(f"betas={betas!r}: expected two numbers")
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= b < 1 for b in (*betas, coeff_beta))):
            raise ConfigurationError(
                f"LAMB(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, coeff_beta={coeff_beta}): "
                "expected lr, eps, weight_decay >= 0 and betas, coeff_beta in [0, 1)"
            )
        if not 0 < min_coeff <= max_coeff:
            raise ConfigurationError("LAMB: expected 0 < min_coeff <= max_coeff")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "coeff_beta": coeff_beta,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """``load_state_dict`` calls it, too, which has cast all state to the parameters' dtypes."""
        super().__setstate__(state)
        for kept in self.state.values():
            if "layer" in kept:
                kept["layer"] = kept["layer"].to(torch.float32, copy=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _step_group(self, group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            if p.grad is None or p.grad.is_sparse:
                raise ConfigurationError("LAMB takes no sparse gradients: build the embedding with sparse=False")
            state = self.state[p]
            init_state(p, state)
            state["step"] += 1
            grad = -p.grad if group["maximize"] else p.grad
            m, v = state["exp_avg"], state["exp_avg_sq"]
            m.lerp_(grad.to(m.dtype), 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            step = float(state["step"])
            first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
            update = (m / first) / ((v / second).sqrt() + group["eps"])
            if group["weight_decay"]:
                update.add_(p, alpha=group["weight_decay"])
            w, u = length(p), length(update)
            ratio = (w / u).clamp(group["min_coeff"], group["max_coeff"])
            coefficient = torch.where((w > 0) & (u > 0), ratio, torch.ones_like(w))
            state["layer"][0].lerp_(coefficient.to(state["layer"].device), 1 - group["coeff_beta"])
            p.sub_(update * (coefficient * group["lr"]).to(update.dtype))


def init_state(p: torch.Tensor, state: dict[str, Any]) -> None:
    """The state before the first step."""
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["layer"] = torch.zeros(1, dtype=torch.float32, device=p.device)
