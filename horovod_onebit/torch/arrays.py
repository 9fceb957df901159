"""Compressed parameters: PyTorch's tensors, and the flat arrays that the core works on, in which memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch

from horovod_onebit.checks import one_of
from horovod_onebit.errors import ConfigurationError
from horovod_onebit.feedback import ErrorFeedback
from horovod_onebit.kernels import Kernels, backend, missing, reference
from horovod_onebit.rules import Tensor
from horovod_onebit.torch.plain import coarsen
from horovod_onebit.torch.rules import Adapter

logger = logging.getLogger("horovod_onebit")

HOST = torch.device("cpu")


def flat(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor``'s elements, 1-D, in the memory order of a dense tensor with ``strides``; a view where it can be."""
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def nonzero(tensors: Sequence[torch.Tensor | None]) -> list[bool]:
    """Whether each of ``tensors`` is there and has anything but zeros; of those on a GPU, asked for together."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            flags.setdefault(tensor.device, []).append(tensor.any())
    found = {device: iter(torch.stack(each).tolist()) for device, each in flags.items()}
    return [tensor is not None and next(found[tensor.device]) for tensor in tensors]


def gradient_of(p: torch.Tensor) -> torch.Tensor:
    """The gradient of ``p``, which can be written to: zeros if it has none, since other workers may have one; a copy if
    elements share memory, as those of an expanded tensor do."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    elif not p.grad.is_sparse and 0 in p.grad.stride() and p.grad.numel() > 1:
        p.grad = p.grad.clone(memory_format=torch.contiguous_format)
    return p.grad


def has_bytes(value: Any) -> bool:
    """Whether ``value`` is a tensor whose bytes can be looked at: it is in memory, dense, and of no class that stands
    for other tensors (a quantized state)."""
    own = isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return own and value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)


def is_dense(p: torch.Tensor) -> bool:
    """Whether ``p`` fills its memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Place:
    """The memory of a GPU, as the core sees it (Numba's simulator takes the host's for that)."""

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    """Of gradients that the kernels take."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self._kernels = kernels
        self.device = device

    def array(self, tensor: torch.Tensor) -> Any:
        """``tensor``, which is flat; it lives as long as the result."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._kernels.Buffer(tensor.data_ptr(), tensor.numel(), dtype, owner=tensor)

    def zeros(self, size: int) -> Any:
        """So many float32 zeros."""
        return self.array(torch.zeros(size, dtype=torch.float32, device=self.device))


class Placement:
    """Which parameters are worked on where they are, on a GPU; all others are worked on in the host's memory.

    "auto" is the GPU for what is there, where the CUDA kernels do what they should; "cuda" insists on them, and takes
    parameters in host memory too if Numba simulates; "cpu" never uses them.
    """

    def __init__(self, kernels: str) -> None:
        one_of("kernels", kernels, Kernels)
        self._kernels = kernels
        self._cuda: Any = backend("cuda") if kernels == "cuda" else None
        if self._cuda is not None and (fault := self._cuda.fault()):
            raise ConfigurationError(f"kernels='cuda': {fault}. Use kernels='cpu'")
        self._warned = False
        self._places: dict[torch.device, Place] = {}
        self._current = -1
        self.look()

    def look(self, devices: Iterable[torch.device] = ()) -> None:
        """See which GPU is the current one. In the hooks of a backward pass it is always that of the gradient.

        ``devices`` are those of parameters. Raises ``ConfigurationError`` if one is a GPU that was the current one when
        parameters on it were met first, and is not now.
        """
        self._current = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        if other := [d for d in devices if d.type == "cuda" and d.index != self._current and d in self._places]:
            raise ConfigurationError(
                f"parameters are on {other[0]}, and the current GPU is cuda:{self._current}: call "
                f"torch.cuda.set_device({other[0].index}) before the optimizer is built, and leave it so"
            )

    def of(self, p: torch.Tensor) -> Place | None:
        """Where ``p`` is worked on; None is the host's memory. A GPU that was found to work is not asked again."""
        found = self._places.get(p.device)
        if found is None and (found := self._place(p)) is not None:
            self._places[p.device] = found
        return found

    def _place(self, p: torch.Tensor) -> Place | None:
        simulated = self._cuda is not None and self._cuda.SIMULATED
        if self._kernels == "cpu" or not (p.is_cuda or simulated):
            return None
        if why := self._cannot(p):
            if p.is_cuda and not self._warned:
                logger.warning("a parameter on %s is compressed in the host's memory, which is slow: %s", p.device, why)
                self._warned = True
            return None
        if p.is_cuda:
            self._cuda.use_stream(lambda: torch.cuda.current_stream().cuda_stream)
        return Place(self._cuda, p.device)

    def _cannot(self, p: torch.Tensor) -> str:
        """Why the kernels cannot work on ``p``; nothing if they can."""
        if self._cuda is None:
            if lacking := missing():
                return lacking
            self._cuda = backend("cuda")
        if p.is_cuda and self._cuda.SIMULATED:
            return "Numba simulates"
        if fault := self._cuda.fault():
            return str(fault)
        if p.is_cuda and p.device.index != self._current:
            return "its GPU is not the current one: call torch.cuda.set_device(local_rank) first"
        return ""


class Binding:
    """One compressed parameter: its PyTorch tensors, and the flat float32 arrays that the core works on.

    float32 parameters are worked on in place, in host memory or in that of ``place``. Others (bfloat16, float64, a GPU
    without kernels) are copied to float32 before a step and back after it; their momentum and second moment are kept
    in float32.
    """

    def __init__(
        self,
        name: str,
        p: torch.Tensor,
        state: MutableMapping[str, Any],
        adapter: Adapter,
        feedback: ErrorFeedback,
        place: Place | None = None,
    ) -> None:
        self.p = p
        self.state = state
        self.device = HOST if place is None else place.device
        self._array: Callable[[torch.Tensor], Any] = torch.Tensor.numpy if place is None else place.array
        self._dtypes = (torch.float32,) if place is None else place.dtypes
        self.in_place = p.dtype is torch.float32 and p.device == self.device and is_dense(p)
        self.strides = p.stride() if is_dense(p) else torch.empty(p.shape).stride()
        self.shared: dict[str, torch.Tensor] = {}
        momentum = self._state_array(adapter.momentum_key)
        variance = self._state_array(adapter.variance_key) if adapter.variance_key else None
        self._weight = self._flat_weight()
        residual = feedback.residual(name, p.numel(), None if place is None else place.zeros)
        self.tensor = Tensor(name, self._array(self._weight), momentum, variance, residual)
        if adapter.anchor_key:
            self.tensor.anchor = self._state_array(adapter.anchor_key)
        if adapter.sent_key:
            self.tensor.sent = self._state_array(adapter.sent_key)
        if key := adapter.layer_key:
            layer = state[key] = state[key].to("cpu", torch.float32)
            self.tensor.layer = layer.numpy()
        self._addresses = self._addresses_now()

    def _flat_weight(self) -> torch.Tensor:
        if self.in_place:
            return flat(self.p.detach(), self.strides)
        return torch.empty(self.p.numel(), dtype=torch.float32, device=self.device)

    def _state_array(self, key: str) -> Any:
        """The state tensor ``key`` as the core sees it, flat float32, sharing memory with ``state[key]``."""
        value = self.state.get(key)
        kept = value is not None  # SGD without momentum has none in its state, compressed or not
        if value is None and self.device == HOST:
            return reference.zeros(self.p.numel())
        if value is None:
            value = torch.zeros_like(self.p, memory_format=torch.preserve_format)
        if value.dtype is not torch.float32 or value.device != self.device or value.stride() != self.strides:
            shared = torch.empty_strided(value.shape, self.strides, dtype=torch.float32, device=self.device)
            value = shared.copy_(value)
        if kept:
            self.state[key] = self.shared[key] = value
        # An overflow of the second moment in warm-up makes an element stand still; infinity would spread here.
        value.nan_to_num_(nan=0.0, posinf=1e30, neginf=-1e30)
        return self._array(flat(value, self.strides))

    def detail(self) -> str:
        """What all workers must have alike, as text; names of servers' residuals contain a digest of it."""
        return f"{tuple(self.p.shape)} {self.strides} {self.p.dtype}"

    def is_current(self) -> bool:
        """Whether the parameter and its state still are the tensors that the arrays share memory with."""
        for key, value in self.shared.items():
            if self.state.get(key) is not value:
                return False
        return self._addresses == self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return [self.p.data_ptr(), *(value.data_ptr() for value in self.shared.values())]

    def coarsen(self, key: str | None) -> None:
        """Round the state tensor ``key``, so that ``state_dict()`` can give multiples of it."""
        if key is not None:
            coarsen(self.shared[key])

    def grad(self) -> Any:
        """The gradient, flat, as the core sees it; shares memory where it can. Valid until the next backward pass."""
        g = gradient_of(self.p).detach()
        return self._array(flat(g, self.strides).to(self.device, g.dtype if g.dtype in self._dtypes else torch.float32))

    def pull(self) -> None:
        """Copy the weights to the core's array; for those that are not ``in_place``."""
        self._weight.copy_(flat(self.p.detach(), self.strides))

    def push(self) -> None:
        """Copy the core's array back to the weights; for those that are not ``in_place``."""
        with torch.no_grad():
            self.p.copy_(self._weight.as_strided(self.p.shape, self.strides))
