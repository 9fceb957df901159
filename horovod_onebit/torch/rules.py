"""From a ``torch.optim`` optimizer to the core's rule and tensors, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.rules import Rule
from horovod_onebit.rules.adam import Adam
from horovod_onebit.rules.lamb import LAMB as LAMBRule
from horovod_onebit.rules.sgd import SGD
from horovod_onebit.schedule import ZeroOne
from horovod_onebit.torch.lamb import LAMB, init_state, modernize
from horovod_onebit.torch.plain import factor

ParamGroup = dict[str, Any]
HYPERPARAMETERS = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "min_coeff", "max_coeff"}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Adapter:
    """How one family of PyTorch optimizers keeps its state, and which rule takes its steps."""

    kind: Any
    momentum_key: str
    variance_key: str | None = None
    anchor_key: str | None = None
    layer_key: str | None = None
    local_keys: tuple[str, ...] = ()  # state that is each worker's own between exchanges

    def keep_float32(self, p: torch.Tensor, loaded: ParamGroup, state: ParamGroup, *, compressed: bool) -> None:
        """Put float32 back where ``load_state_dict`` has cast ``loaded`` to the dtype of ``p``."""
        keys = (self.momentum_key, self.variance_key, self.anchor_key) if compressed else ()
        for key in (*keys, self.layer_key):
            value = loaded.get(key) if key else None
            if value is not None and value.dtype is torch.float32 and p.dtype is not torch.float32:
                state[key] = value.detach().clone()

    def check(self, group: ParamGroup) -> None:
        """Refuse what the rule cannot do."""
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"{self.kind.__name__}({option}=True) has no 1-bit form: build the optimizer without {option}"
                )

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> bool | None:
        """Give ``p`` the state that its first step would make, so that all workers have the same, before and after.

        True if it has a momentum now that must not be there at its first step.
        """
        raise NotImplementedError

    def variance_factor(self, group: ParamGroup, taken: int, seen: int) -> float:
        """See ``plain.factor``."""
        return 1.0

    def rewind(self, group: ParamGroup, state: dict[str, Any], steps: int) -> None:
        """Fit the state of a parameter that goes back to exact steps to ``steps``, those that its variance has seen."""

    def rule(self, group: ParamGroup, grad_scale: float) -> Rule:
        """The rule with the hyperparameters that ``group`` has now."""
        raise NotImplementedError


class AdamAdapter(Adapter):
    kind: Any = torch.optim.Adam
    momentum_key = "exp_avg"
    variance_key = "exp_avg_sq"

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> None:
        if "exp_avg" in state:
            return
        device = p.device if group["fused"] else "cpu"
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 and not group["fused"] else torch.float32
        state["step"] = torch.zeros((), dtype=dtype, device=device)
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def variance_factor(self, group: ParamGroup, taken: int, seen: int) -> float:
        return factor(float(group["betas"][1]), taken, seen)

    def rewind(self, group: ParamGroup, state: dict[str, Any], steps: int) -> None:
        # Adam corrects both moments by one count; the momentum's is higher, so it would be corrected too much.
        beta1 = float(group["betas"][0])
        taken = float(state["step"])
        if taken > steps > 0:
            state["exp_avg"].mul_((1 - beta1**steps) / (1 - beta1**taken))
            state["step"].fill_(steps)

    def rule(self, group: ParamGroup, grad_scale: float) -> Adam:
        beta1, beta2 = group["betas"]
        return Adam(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            grad_scale=-grad_scale if group["maximize"] else grad_scale,
        )


class SGDAdapter(Adapter):
    kind = torch.optim.SGD
    momentum_key = "momentum_buffer"

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> bool:
        if group["momentum"] == 0:
            state["momentum_buffer"] = None
        elif state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            # With dampening, the first step treats a missing buffer differently from one that is zero.
            return group["dampening"] != 0
        return False

    def rule(self, group: ParamGroup, grad_scale: float) -> SGD:
        return SGD(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            grad_scale=-grad_scale if group["maximize"] else grad_scale,
        )


LAMB_OPTIONS = ["eps", "weight_decay", "bias_correction", "min_coeff", "max_coeff", "coeff_beta"]


class LAMBAdapter(AdamAdapter):
    kind = LAMB
    layer_key = "layer"

    def keep_float32(self, p: torch.Tensor, loaded: ParamGroup, state: ParamGroup, *, compressed: bool) -> None:
        super().keep_float32(p, loaded, state, compressed=compressed)
        modernize(state)

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> None:
        init_state(p, state)

    def variance_factor(self, group: ParamGroup, taken: int, seen: int) -> float:
        return super().variance_factor(group, taken, seen) if group["bias_correction"] else 1.0

    def rewind(self, group: ParamGroup, state: dict[str, Any], steps: int) -> None:
        if group["bias_correction"]:
            super().rewind(group, state, steps)

    def rule(self, group: ParamGroup, grad_scale: float) -> LAMBRule:
        beta1, beta2 = group["betas"]
        return LAMBRule(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            grad_scale=-grad_scale if group["maximize"] else grad_scale,
            **{name: group[name] for name in LAMB_OPTIONS},
        )


ADAPTERS: tuple[type[Adapter], ...] = (AdamAdapter, SGDAdapter, LAMBAdapter)


def _unwrapped_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    return inspect.unwrap(kind.step)


class ZeroOneAdapter(AdamAdapter):
    """Adam as 0/1 Adam; the state holds the weights at the last exchange besides."""

    anchor_key = "anchor"
    layer_key = "local"
    local_keys = ("exp_avg", "anchor", "local")

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> None:
        super().init_state(group, p, state)
        if "anchor" not in state:
            state["anchor"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["local"] = torch.tensor([0.0, 1.0, 0.0])


def adapter_for(optimizer: torch.optim.Optimizer, schedule: ZeroOne | None = None) -> Adapter:
    """The adapter of ``optimizer``, or ``UnsupportedError`` that lists the optimizers that have one."""
    for adapter in ADAPTERS:
        same_step = _unwrapped_step(type(optimizer)) is _unwrapped_step(adapter.kind)
        if isinstance(optimizer, adapter.kind) and same_step:
            if schedule is None:
                return adapter()
            if adapter is AdamAdapter:
                return ZeroOneAdapter()
            raise UnsupportedError(f"0/1 Adam is Adam or AdamW, and the optimizer is {type(optimizer).__name__}")
    raise UnsupportedError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has no 1-bit form. Optimizers that have one: "
        "torch.optim.Adam, AdamW, SGD, horovod_onebit.torch.LAMB (a subclass must not override step()). Use "
        "horovod.torch.DistributedOptimizer for others"
    )


def check_parameter(name: str, p: torch.Tensor) -> None:
    """Refuse parameters that cannot be compressed, before the first step."""
    if p.dtype not in DTYPES:
        raise UnsupportedError(
            f"parameter {name!r} is {p.dtype}; expected one of {', '.join(map(str, DTYPES))}. "
            "Freeze it (requires_grad=False), or store complex weights as two real tensors"
        )
    if p.device.type == "meta":
        raise UnsupportedError(f"parameter {name!r} is on the meta device: give it memory first (to_empty, then load)")
    if p.layout is not torch.strided:
        raise UnsupportedError(f"parameter {name!r} has layout {p.layout}; expected a dense (strided) tensor")
