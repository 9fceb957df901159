"""Exact averaging of gradients during the backward pass, by Horovod's conventions.

This is what ``hvd.DistributedOptimizer`` does: a hook for each parameter starts its allreduce when its gradient is
ready; ``synchronize`` waits for all. Unlike there, ``p.grad`` keeps this worker's own gradient until then, so that it
can be changed in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch._compile import _disable_dynamo as untraced
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_onebit.checks import whole
from horovod_onebit.errors import ConfigurationError, UnsupportedError
from horovod_onebit.stats import Traffic, allreduce_bytes

_owners: Any = WeakTensorKeyDictionary()
"""Parameter -> (its hook, whose it is): a hook lives as long as its parameter, and there may be only one."""


class Synchronizer:
    """Averages gradients of the parameters it was given.

    In warm-up each gradient starts on its way as soon as it is ready; afterwards the hooks only count backward
    passes, and ``average_fused`` does the few tensors that stay exact in one go.
    """

    def __init__(
        self,
        *,
        names: dict[torch.Tensor, str],
        prefix: str,
        on_ready: Callable[[torch.Tensor], bool],
        compression: Any,
        backward_passes_per_step: int,
        op: Any,
        gradient_predivide_factor: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: Any,
        traffic: Traffic,
    ) -> None:
        self.names = names
        self.prefix = prefix  # optimizers may have parameters of the same name under way at once
        self.on_ready = on_ready  # called with parameters whose gradients are final: may their averages start?
        self.compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.traffic = traffic
        average = op == hvd.Average
        self.prescale = 1.0 / gradient_predivide_factor if average else 1.0
        self.postscale = gradient_predivide_factor if average else 1.0
        self.parameters: list[torch.Tensor] = []
        self.lost: set[torch.Tensor] = set()  # parameters that another DistributedOptimizer took over
        self.passes_left: dict[torch.Tensor, int] = {}
        self.handles: dict[torch.Tensor, tuple[Any, Any]] = {}
        self.asked = False  # the user called synchronize()
        self.arrived = False  # the exact gradients are averaged already, or stay local since all workers agreed
        self.automatic = True  # step() synchronizes
        self._arguments = self._describe(groups, gradient_predivide_factor)
        # Names of averages that were abandoned under way are not free yet.
        self._refused = 0  # times that all workers abandoned them together
        self._abandoned = 0  # times that this one did so since

    def _describe(self, groups: int | list[list[torch.Tensor]] | None, predivide: float) -> str:
        """The arguments, as a text that must be the same on all workers."""
        named = [[self.names.get(p) for p in g] for g in groups] if isinstance(groups, list) else groups
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        return f"{compression} {self.op} {predivide} {named} {self.sparse_as_dense}"

    def description(self) -> str:
        """What must be the same on all workers."""
        return f"{self._arguments} {self.backward_passes_per_step} {self.generation}"

    @property
    def generation(self) -> str:
        """In the names of averages; the same on all workers after each step that all of them refuse."""
        return f"{self._refused}.{self._abandoned}"

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch ``parameters`` from now on (the same ones in the same order on every worker)."""
        for p in parameters:
            self.parameters.append(p)
            self.passes_left[p] = self.backward_passes_per_step
            self._take(p)

    def _take(self, p: torch.Tensor) -> None:
        """Hook ``p``; a DistributedOptimizer that had it before lets go of it."""
        if p in _owners:
            handle, owner = _owners[p]
            handle.remove()
            if owner() not in (None, self):
                owner().lost.add(p)
        own = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            synchronizer = own()
            if synchronizer is not None:
                synchronizer._hook(parameter)

        _owners[p] = (p.register_post_accumulate_grad_hook(hook), own)

    def forget(self, parameters: set[torch.Tensor]) -> None:
        """Stop watching ``parameters``, which were taken out of the optimizer."""
        self.parameters = [p for p in self.parameters if p not in parameters]
        self.lost -= parameters
        for p in parameters:
            self.passes_left.pop(p, None)
            self.handles.pop(p, None)
            if p in _owners and _owners[p][1]() is self:
                _owners.pop(p)[0].remove()

    def check_owned(self) -> None:
        """Raise if another DistributedOptimizer was built over one of the parameters since."""
        if self.lost:
            names = ", ".join(sorted(self.names[p] for p in self.lost))
            raise ConfigurationError(
                f"parameter {names} belongs to a DistributedOptimizer that was built later: use that one, and "
                "one optimizer for each parameter"
            )

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = whole("backward_passes_per_step", passes)
        self.reset()

    def reset(self) -> None:
        """Forget gradients that were computed and not yet used."""
        self.handles.clear()
        for p in self.passes_left:
            self.passes_left[p] = self.backward_passes_per_step

    def abandon(self, *, on_all: bool = False) -> None:
        """Drop what is under way; ``on_all``: all workers do so, whether or not they have started anything."""
        if on_all:
            self._refused, self._abandoned = self._refused + 1, 0
        else:
            self._abandoned += any(handle is not None for handle, _ in self.handles.values())
        self.asked = self.arrived = False
        self.reset()

    def forget_world(self) -> None:
        """Horovod was started anew: nothing is under way, and new workers have abandoned nothing."""
        self.reset()
        self.asked = self.arrived = False
        self._refused = self._abandoned = 0

    @untraced
    def _hook(self, p: torch.Tensor) -> None:
        if self.passes_left[p] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._densify(p)
        self.passes_left[p] -= 1
        self.handles.setdefault(p, (None, None))
        if self.passes_left[p]:
            return
        if self.on_ready(p):
            self.handles[p] = self._start(p, in_place=False)

    def _densify(self, p: torch.Tensor) -> None:
        if p.grad is None or not p.grad.is_sparse:
            return
        if not self.sparse_as_dense:
            raise UnsupportedError(
                f"parameter {self.names[p]!r} has a sparse gradient: pass sparse_as_dense=True to "
                "DistributedOptimizer, or build the embedding with sparse=False"
            )
        p.grad = p.grad.to_dense()

    def _gradient(self, p: torch.Tensor) -> torch.Tensor:
        """The contiguous gradient of ``p``; zeros if it has none, since other workers may have one."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad.contiguous()

    def _compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        # Horovod reduces no bfloat16.
        return self.compression.compress(tensor.float() if tensor.dtype is torch.bfloat16 else tensor)

    def _start(self, p: torch.Tensor, *, in_place: bool) -> tuple[Any, Any]:
        tensor, context = self._compress(self._gradient(p))
        self._count(tensor, p)
        allreduce = hvd.allreduce_async_ if in_place else hvd.allreduce_async
        return allreduce(tensor, name=self._name(p), **self._how()), context

    def _name(self, p: torch.Tensor) -> str:
        return f"{self.prefix}.{self.generation}.{self.names[p]}"

    def _how(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "prescale_factor": self.prescale,
            "postscale_factor": self.postscale,
            "process_set": self.process_set,
        }

    def _count(self, tensor: torch.Tensor, p: torch.Tensor) -> None:
        workers = self.process_set.size()
        sent = allreduce_bytes(tensor.numel() * tensor.element_size(), workers)
        self.traffic.add(sent, allreduce_bytes(4 * p.numel(), workers))

    def pending(self) -> bool:
        """Whether gradients were computed since the last step."""
        return bool(self.handles)

    def wait(self, *, again: bool = False) -> None:
        """Start what the hooks did not, wait for everything; the gradients are then the average (or the sum).

        ``again``: on some worker gradients were changed after their averages had left. What left is dropped, and the
        gradients of now are averaged.
        """
        if again:
            self._start_rest(in_place=False)
            for handle, _ in self.handles.values():
                if handle is not None:
                    hvd.synchronize(handle)
            self.handles.clear()
        self._start_rest(in_place=True)
        for p, (handle, context) in self.handles.items():
            if handle is not None:
                self._store(p, hvd.synchronize(handle), context)
        self.reset()

    def _start_rest(self, *, in_place: bool) -> None:
        for p in self.parameters:
            if p.requires_grad and self.handles.get(p, (None, None))[0] is None:
                self.handles[p] = self._start(p, in_place=in_place)

    def _store(self, p: torch.Tensor, output: torch.Tensor, context: Any) -> None:
        result = self.compression.decompress(output, context)
        assert p.grad is not None
        if result.data_ptr() != p.grad.data_ptr():
            p.grad.copy_(result)

    def average_fused(self, parameters: Sequence[torch.Tensor], name: str) -> Callable[[], bool]:
        """Start one allreduce (for each dtype) for all of ``parameters``.

        The function that is returned waits, stores the averages, and says whether all of them are finite.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for p in parameters:
            by_dtype.setdefault(p.dtype, []).append(p)
        waiting = [self._start_fused(group, f"{name}.{dtype}") for dtype, group in by_dtype.items()]

        def finish() -> bool:
            finite = True
            for group, handle, context in waiting:
                flat = self.compression.decompress(hvd.synchronize(handle), context)
                for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                    p.grad = part.view(p.shape).to(p.dtype)
                finite &= bool(torch.isfinite(flat).all())
            return finite

        return finish

    def _start_fused(self, group: list[torch.Tensor], name: str) -> tuple[list[torch.Tensor], Any, Any]:
        fused = torch.cat([self._gradient(p).reshape(-1) for p in group])
        tensor, context = self._compress(fused)
        workers = self.process_set.size()
        sent = allreduce_bytes(tensor.numel() * tensor.element_size(), workers)
        self.traffic.add(sent, allreduce_bytes(4 * fused.numel(), workers))
        return group, hvd.allreduce_async_(tensor, name=name, **self._how()), context


@torch.no_grad()
def all_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients of ``parameters`` are finite."""
    grads = [p.grad for p in parameters if p.grad is not None]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for g in grads:
        sums.setdefault(g.device, []).append(g.sum(dtype=torch.float32))
    # NaN and Inf show in a sum. A sum of finite numbers may overflow: only then does every element count.
    if all(bool(torch.isfinite(torch.stack(each)).all()) for each in sums.values()):
        return True
    return all(bool(torch.isfinite(g).all()) for g in grads)


def unscale(parameters: Sequence[torch.Tensor], loss_scale: float) -> None:
    """Divide the gradients of ``parameters`` by ``loss_scale``."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(1.0 / loss_scale)
