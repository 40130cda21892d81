"""Where the host optimizer keeps state, gradients and new weights; those in files are in `file_homes`."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.device import device_module, pinned_empty, placed, recorded

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

MASTER = "master"
"""The fp32 copy of a weight, among the optimizer's own tensors."""


class StateHome(Protocol):
    """Masters and moments on the host, by the number of their parameter, and the optimizers that step them."""

    def add(self, master: Tensor, settings: dict[str, Any]) -> None:
        """The next parameter: fp32 in its own shape, and its group's settings."""

    def step(
        self, number: int, lr: float, gradient: Callable[[int, int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Step with fp32 `gradient(start, stop)`; (start, new flat fp32 values) piece by piece."""

    def state(self, number: int) -> dict[str, Tensor]:
        """Optimizer state and `master`, in the parameter's shape."""

    def load_state(self, number: int, state: dict[str, Tensor]) -> None:
        """Go on with a saved state."""


class GradientHome(Protocol):
    """Gradients on the host, by the number of their parameter."""

    def add(self, n_elements: int, dtype: torch.dtype) -> None:
        """The next parameter's gradient."""

    def landing(self, number: int, first: bool) -> Tensor:
        """Where the device may copy the next one to: flat, as long as it is."""

    def landed(self, number: int, landing: Tensor, first: bool, copied: Any) -> None:
        """It is there after the event `copied`: the first of a window, or one to be added."""

    def norm(self, number: int) -> Tensor:
        """fp32, ()."""

    def piece(self, number: int, start: int, stop: int) -> Tensor:
        """Part of it, until the next call."""


class WeightHome(Protocol):
    """The weights that forward and backward read."""

    def read(self, weight: nn.Parameter) -> Tensor:
        """All of it, flat, on the host."""

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        """New values from flat index `start` on, fp32, on the host."""

    def written(self, weight: nn.Parameter) -> None:
        """It is complete: what reads it from now on gets the new values."""


class MemoryState:
    """Masters and moments in host memory."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self._kept: list[tuple[Tensor, Optimizer]] = []

    def add(self, master: Tensor, settings: dict[str, Any]) -> None:
        self._kept.append((master, self._make([{**settings, "params": [master]}])))

    def step(
        self, number: int, lr: float, gradient: Callable[[int, int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        master, optimizer = self._kept[number]
        master.grad = gradient(0, master.numel()).view(master.shape)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        master.grad = None
        yield 0, master.view(-1)

    def state(self, number: int) -> dict[str, Tensor]:
        master, optimizer = self._kept[number]
        return {**optimizer.state.get(master, {}), MASTER: master}

    def load_state(self, number: int, state: dict[str, Tensor]) -> None:
        master, optimizer = self._kept[number]
        master.copy_(state[MASTER])
        optimizer.state[master] = placed(state, master, fused=True)


class MemoryGradients:
    """A buffer for every gradient, and for those on their way that are to be added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gradients: list[Tensor] = []
        self._spare: defaultdict[int, list[Tensor]] = defaultdict(list)
        """By length."""

    def add(self, n_elements: int, dtype: torch.dtype) -> None:
        self._gradients.append(self._empty(n_elements, dtype))

    def landing(self, number: int, first: bool) -> Tensor:
        gradient = self._gradients[number]
        if first:
            return gradient
        spare = self._spare[gradient.numel()]
        return spare.pop() if spare else self._empty(gradient.numel(), gradient.dtype)

    def landed(self, number: int, landing: Tensor, first: bool, copied: Any) -> None:
        if not first:
            copied.synchronize()
            self._gradients[number].add_(landing)
            self._spare[landing.numel()].append(landing)

    def norm(self, number: int) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._gradients[number], dtype=torch.float32)
        return norm

    def piece(self, number: int, start: int, stop: int) -> Tensor:
        return self._gradients[number][start:stop]

    def _empty(self, n_elements: int, dtype: torch.dtype) -> Tensor:
        return pinned_empty(n_elements, dtype, self._device)


class DeviceWeights:
    """The weights stay on the device; new values go there through two buffers of the largest one's size."""

    N_BUFFERS = 2

    def __init__(self, weights: Iterable[nn.Parameter], device: torch.device) -> None:
        self._device, self._module = device, device_module(device)
        self._compute, self._h2d = self._module.current_stream(), self._module.Stream()
        self._longest = max((weight.numel() for weight in weights), default=0)
        self._buffers: deque[tuple[Tensor, Any]] = deque()

    def read(self, weight: nn.Parameter) -> Tensor:
        return weight.detach().flatten().to("cpu", copy=True)

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        buffer = self._buffer(weight.dtype)
        filled = buffer[: piece.numel()].copy_(piece)
        target = weight.detach().view(-1)[start : start + piece.numel()]
        self._h2d.wait_event(recorded(self._module, self._compute))  # the old values have been read
        with self._module.stream(self._h2d):
            target.copy_(filled, non_blocking=True)
        self._buffers.append((buffer, recorded(self._module, self._h2d)))

    def written(self, weight: nn.Parameter) -> None:
        self._compute.wait_event(recorded(self._module, self._h2d))

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        """One that nothing is copied from any more."""
        if len(self._buffers) < self.N_BUFFERS:
            return pinned_empty(self._longest, dtype, self._device)
        buffer, copied = self._buffers.popleft()
        copied.synchronize()
        return buffer
