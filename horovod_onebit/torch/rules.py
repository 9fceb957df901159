"""From a ``torch.optim`` optimizer to the core's rule and tensors, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import torch

from horovod_onebit.errors import UnsupportedError
from horovod_onebit.handshake import compared
from horovod_onebit.rules import Rule, Wraps, listed, wrapped
from horovod_onebit.rules.adam import plain_factor
from horovod_onebit.rules.gradient import Gradient
from horovod_onebit.rules.local import no_steps
from horovod_onebit.schedule import Stepwise
from horovod_onebit.torch.lamb import init_state
from horovod_onebit.torch.plain import VARIANCE_BETA2, VARIANCE_STEPS

ParamGroup = dict[str, Any]
HYPERPARAMETERS = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "min_coeff", "max_coeff"}
ZERO_ONE_KEYS = ("anchor", "local")
"""What 0/1 Adam keeps in a parameter's state besides: the weights at the last exchange, and counts since."""
RULES = 16
"""That are kept, in runs of several groups."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Adapter:
    """How one family of PyTorch optimizers keeps its state, and which rule takes its steps."""

    layer_key: str | None = None
    anchor_key: str | None = None
    sent_key: str | None = None
    makes_state = True  # by ``init_state``
    momentum_may_be_missing = False  # one that is 0 has no state
    reproducible = True  # whether equal gradients and states are known to make equal steps
    local_keys: tuple[str, ...] = ()  # state that is each worker's own between exchanges

    def __init__(self, wraps: Wraps) -> None:
        self.wraps = wraps
        self.momentum_key, self.variance_key = wraps.momentum, wraps.variance
        split = [(field, *path.partition(".")[::2]) for field, path in wraps.options.items()]
        self._options = [(field, name, int(position) if position else None) for field, name, position in split]
        self._rules: dict[tuple, Rule] = {}  # that were built last, by their hyperparameters

    @property
    def divides(self) -> bool:
        """Whether the optimizer divides by a second moment of each element."""
        return self.wraps.rule.has_variance

    def keep_float32(self, p: torch.Tensor, loaded: ParamGroup, state: ParamGroup, *, compressed: bool) -> None:
        """Put float32 back where ``load_state_dict`` has cast ``loaded`` to the dtype of ``p``."""
        keys = (self.momentum_key, self.variance_key, self.anchor_key) if compressed else ()
        for key in (*keys, self.layer_key):
            value = loaded.get(key) if key else None
            if value is not None and value.dtype is torch.float32 and p.dtype is not torch.float32:
                state[key] = value.detach().clone()

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse what the rule cannot do, of a parameter group's options or others."""
        self.wraps.check(self.wraps.names[0], options.get)

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> bool | None:
        """Give ``p`` the state that its first step would make, so that all workers have the same, before and after.

        True if it has a momentum now that must not be there at its first step.
        """
        if self.momentum_key not in state:
            if self.variance_key is not None:
                state["step"] = self.counter(group, p)
            for key in filter(None, (self.momentum_key, self.variance_key)):
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return None

    def counter(self, group: ParamGroup, p: torch.Tensor) -> torch.Tensor:
        """The count of steps that comes with a second moment, before the first."""
        return torch.zeros((), dtype=torch.float32)

    def variance_factor(self, group: ParamGroup, taken: int, seen: int, before: float | None = None) -> float:
        """See ``rules.adam.plain_factor``."""
        return 1.0

    def rewind(
        self, group: ParamGroup, state: MutableMapping[str, Any], steps: int, before: float | None = None
    ) -> None:
        """Fit the state of a parameter that goes back to exact steps to ``steps``, those that its second moment has
        seen; ``before``: beta2 in these, if it was another."""

    def to_plain(self, group: ParamGroup, p: torch.Tensor, state: MutableMapping[str, Any]) -> None:
        """Make of ``state``, in which a compressed run has left its marks, what a plain optimizer has."""
        for key in filter(None, (self.momentum_key, self.variance_key, self.layer_key)):
            value = state.get(key)
            if value is not None:
                state[key] = value.to(p.device, value.dtype if key == self.layer_key else p.dtype)
        self.rewind(group, state, state.pop(VARIANCE_STEPS), state.pop(VARIANCE_BETA2, None))
        for key in set(ZERO_ONE_KEYS) - {self.anchor_key, self.layer_key}:
            state.pop(key, None)

    def complete(self, p: torch.Tensor, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` has what a step of ``p`` needs; if not, it has to begin from the start."""
        kept = [state.get(key) for key in (self.momentum_key, self.variance_key) if key is not None]
        counted = self.variance_key is None or "step" in state
        return counted and all(isinstance(one, torch.Tensor) and one.shape == p.shape for one in kept)

    def rule(self, group: ParamGroup, grad_scale: float) -> Rule:
        """The rule with the hyperparameters that ``group`` has now: built, and validated, when they have changed."""
        values = {}
        for field, name, position in self._options:
            value = group[name] if position is None else group[name][position]
            values[field] = value if isinstance(value, bool) else float(value)
        scale = -grad_scale if group.get("maximize") else grad_scale
        key = (scale, *values.values())
        if (found := self._rules.get(key)) is None:
            if len(self._rules) >= RULES:
                self._rules.clear()
            found = self.wraps.rule(**values, **self.wraps.fixed, grad_scale=scale)  # type: ignore[call-arg]
            self._rules[key] = found
        return found

    def hyperparameters(self, group: ParamGroup) -> dict[str, object]:
        """The rule of ``group``, and what else the exact step depends on (``fused`` rounds differently)."""
        options = {key: _plain(value) for key, value in vars(self.rule(group, 1.0)).items()}
        return {**options, "fused": group.get("fused"), "foreach": group.get("foreach")}

    def restart(self, state: Mapping[str, Any], steps: int | None = None) -> None:
        """Forget what steps without a gradient have left in ``state``: those of weight decay. ``steps``: how many are
        counted from now on, if it is not all."""
        for key in filter(None, (self.momentum_key, self.variance_key)):
            if key in state:
                state[key].zero_()
        self.forget_layer(state)
        if steps is not None and "step" in state:
            state["step"].fill_(steps)

    def forget_layer(self, state: Mapping[str, Any]) -> None:
        """Forget what was learned of a layer in a step without a gradient, if anything is learned."""


class AdamAdapter(Adapter):
    def counter(self, group: ParamGroup, p: torch.Tensor) -> torch.Tensor:
        fused = group.get("fused")  # LAMB has no such option
        device = p.device if fused else "cpu"
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 and not fused else torch.float32
        return torch.zeros((), dtype=dtype, device=device)

    def variance_factor(self, group: ParamGroup, taken: int, seen: int, before: float | None = None) -> float:
        return plain_factor(float(group["betas"][1]), taken, seen, before)

    def rewind(
        self, group: ParamGroup, state: MutableMapping[str, Any], steps: int, before: float | None = None
    ) -> None:
        # Adam corrects both moments by one count; the momentum's is higher, so it would be corrected too much.
        beta1 = float(group["betas"][0])
        taken = float(state["step"])
        if taken > steps > 0:
            state["exp_avg"].mul_((1 - beta1**steps) / (1 - beta1**taken))
        if steps > 0:  # a worker may have taken fewer than were seen: with local steps, gradients may be missing
            state["step"].fill_(steps)
            if (by := self.variance_factor(group, steps, steps, before)) != 1.0:
                state["exp_avg_sq"] = state["exp_avg_sq"] * by


class SGDAdapter(Adapter):
    momentum_may_be_missing = True

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> bool:
        if group["momentum"] == 0:
            state["momentum_buffer"] = None
        elif state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            # With dampening, the first step treats a missing buffer differently from one that is zero.
            return group["dampening"] != 0
        return False


class LAMBAdapter(AdamAdapter):
    layer_key = "layer"

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> None:
        init_state(p, state)

    def forget_layer(self, state: Mapping[str, Any]) -> None:
        if self.layer_key in state:
            state[self.layer_key].zero_()

    def variance_factor(self, group: ParamGroup, taken: int, seen: int, before: float | None = None) -> float:
        return super().variance_factor(group, taken, seen, before) if group["bias_correction"] else 1.0

    def rewind(
        self, group: ParamGroup, state: MutableMapping[str, Any], steps: int, before: float | None = None
    ) -> None:
        if group["bias_correction"]:
            super().rewind(group, state, steps, before)


class ZeroOneAdapter(AdamAdapter):
    """Adam as 0/1 Adam; the state holds the weights at the last exchange besides."""

    anchor_key, layer_key = ZERO_ONE_KEYS
    local_keys = ("exp_avg", *ZERO_ONE_KEYS)

    def init_state(self, group: ParamGroup, p: torch.Tensor, state: dict[str, Any]) -> None:
        super().init_state(group, p, state)
        if "anchor" not in state:
            state["anchor"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["local"] = torch.from_numpy(no_steps())


class AnyAdapter(Adapter):
    """Any optimizer, which takes its own steps: of its state, nothing is touched, and no empty entry is made, which it
    might take for its own."""

    makes_state = False

    def __init__(self, optimizer: torch.optim.Optimizer, wraps: Wraps | None = None) -> None:
        super().__init__(wraps or Wraps("any", Gradient, momentum=""))
        self._optimizer = optimizer
        self.reproducible = f"{type(optimizer).__module__}.".startswith(("torch.optim.", "horovod_onebit.torch."))
        self._compared = HYPERPARAMETERS | (set(optimizer.defaults) if self.reproducible else set())

    @property
    def divides(self) -> bool:
        with suppress(UnsupportedError):
            return adapter_for(self._optimizer).divides
        return False

    def to_plain(self, group: ParamGroup, p: torch.Tensor, state: MutableMapping[str, Any]) -> None:
        adapter_for(self._optimizer).to_plain(group, p, state)  # it was compressed by another wrapper

    def complete(self, p: torch.Tensor, state: Mapping[str, Any]) -> bool:
        return True

    def rule(self, group: ParamGroup, grad_scale: float) -> Rule:
        return Gradient()

    def hyperparameters(self, group: ParamGroup) -> dict[str, object]:
        """All of PyTorch's own optimizers and ours. Of others those that all call the same, as more may be what a
        worker has found out."""
        return {key: str(_plain(value)) for key, value in sorted(group.items()) if key in self._compared}


def _plain(value: Any) -> Any:
    """A hyperparameter as it is compared: without its device, and with more digits than PyTorch prints of a tensor."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return compared(value)


ADAPTERS = {
    "torch.optim.Adam": AdamAdapter,
    "torch.optim.SGD": SGDAdapter,
    "horovod_onebit.torch.LAMB": LAMBAdapter,
}
"""For those whose state is more than a momentum."""
COMMON = {"maximize", "foreach", "fused"}
"""Options that all may have, and that the step here takes into account."""


def _unwrapped_step(kind: type) -> Any:
    return inspect.unwrap(kind.step)  # type: ignore[attr-defined]


def _base(kind: type, wraps: Wraps) -> type | None:
    """The class that ``wraps`` means, among the bases of ``kind``; None if it is not there."""
    if wraps.module:
        named: type = resolve_name(wraps.optimizer)
        return named if issubclass(kind, named) else None
    return next((base for base in kind.__mro__ if base.__name__ in wraps.names and hasattr(base, "step")), None)


def _check_options(optimizer: torch.optim.Optimizer, wraps: Wraps) -> None:
    """Refuse what a class of some other package does besides."""
    kind, needed = type(optimizer).__qualname__, {path.partition(".")[0] for path in wraps.options.values()}
    if missing := needed - optimizer.defaults.keys():
        raise UnsupportedError(f"{kind} has no option {', '.join(sorted(missing))}: expected one like lion-pytorch's")
    bases = [base for base in type(optimizer).__mro__ if base.__module__ not in ("builtins", "torch.optim.optimizer")]
    if any(base.__module__.partition(".")[0] == "bitsandbytes" for base in bases):
        raise UnsupportedError(f"bitsandbytes' {kind} keeps its state in a form of its own: use lion-pytorch's Lion")
    known, own = COMMON, vars(optimizer)
    if "maximize" not in optimizer.defaults:  # only what is in the groups is taken into account
        known = COMMON - {"maximize"}
    names = {name for base in bases for name in inspect.signature(base).parameters}
    arguments = {name: own[name] for name in (names & own.keys()) - {"defaults"}}  # which PyTorch's own class has
    for name, value in (arguments | optimizer.defaults).items():
        if value and name not in needed | wraps.requires.keys() | known:
            raise UnsupportedError(f"{kind}({name}={value!r}) has no 1-bit form: build the optimizer without {name}")


def adapter_for(optimizer: torch.optim.Optimizer, schedule: Stepwise | None = None) -> Adapter:
    """The adapter of ``optimizer``, or ``UnsupportedError`` that lists the optimizers that have one."""
    kind = type(optimizer)
    for wraps in wrapped("torch"):
        base = _base(kind, wraps)
        if base is None or _unwrapped_step(kind) is not _unwrapped_step(base):
            continue
        adapter = ADAPTERS.get(wraps.optimizer, Adapter)(wraps)
        if not wraps.module:
            _check_options(optimizer, wraps)
            adapter.check(vars(optimizer))
        if schedule is None:
            return adapter
        if type(adapter) is AdamAdapter:
            return ZeroOneAdapter(wraps)
        raise UnsupportedError(f"schedule={schedule!r} is for Adam and AdamW, and the optimizer is {kind.__name__}")
    raise UnsupportedError(
        f"{kind.__module__}.{kind.__qualname__} has no 1-bit form. Optimizers that have one: {listed('torch')} (a "
        "subclass must not override step()). With recipe='exact', schedule=horovod_onebit.torch.Gradients(), or "
        "schedule=horovod_onebit.torch.Local(...), any optimizer works"
    )


def check_parameter(name: str, p: torch.Tensor) -> None:
    """Refuse parameters that cannot be compressed, before the first step."""
    if any(hasattr(p, mark) for mark in ("device_mesh", "_is_flat_param", "_fsdp_flattened")):
        raise UnsupportedError(
            f"parameter {name!r} is sharded over the workers (DTensor, FSDP, tensor parallelism), "
            "and bits are exchanged of whole gradients: keep the model whole on every worker, without FSDP"
        )
    if p.dtype not in DTYPES:
        raise UnsupportedError(
            f"parameter {name!r} is {p.dtype}; expected one of {', '.join(map(str, DTYPES))}. "
            "Freeze it (requires_grad=False), or store complex weights as two real tensors"
        )
    if p.device.type == "meta":
        raise UnsupportedError(f"parameter {name!r} is on the meta device: give it memory first (to_empty, then load)")
    if p.layout is not torch.strided:
        raise UnsupportedError(f"parameter {name!r} has layout {p.layout}; expected a dense (strided) tensor")
