"""The optimizer on the host: gradients stream out in backward, new weights stream back before they are next read.

    device    ... backward 2 | backward 1 | backward 0 |          | forward 0 | forward 1 ...
    d2h           gradient 2 .. | gradient 1 .. | gradient 0 ..
    host                                                   step 0 | step 1    | step 2 ...
    h2d                                                    weights 0 | weights 1 | ...

- A gradient leaves as soon as it is whole (with `accumulate` that of every micro-batch, added up on the host) and is
  let go when the compute stream has waited for its copy: the device holds the few that are under way.
- Clipping, and that a step which is not finite changes nothing, need the norm over all gradients. So the host steps
  when the last one has come: not at once, but each parameter when the next forward pass is about to read it. While the
  device computes one block, the host steps the next.
- Masters, moments and gradients lie in the homes of `host_homes` (memory) or `file_homes`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.device import device_module, recorded
from memtrain.memory.host_homes import GradientHome, StateHome, WeightHome
from memtrain.model.language_model import LanguageModel, Segment
from memtrain.model.layers import gradient_dtype


@dataclass(eq=False)
class _Slot:
    """One parameter."""

    number: int
    weight: nn.Parameter
    group: dict[str, Any]
    filled: bool = False
    """A gradient of this window is on the host, or on its way."""
    arrived: Any = None
    """Event: it is there."""
    norm: Tensor | None = None
    lr: float = 0.0


@dataclass(frozen=True, eq=False)
class _Leaving:
    slot: _Slot
    gradient: Tensor
    """On the device, until it has been copied."""
    landing: Tensor
    first: bool
    copied: Any


class HostOptimizer:
    """Steps on the host what is in `groups`. `start` before the first window.

    `accumulate`: gradients leave after every micro-batch; else only in the last backward of a window. Numbers are those
    of the optimizer on the device: the same sums in the same order, factor and step in fp32.
    """

    steps_in_backward = False

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        device: torch.device,
        accumulate: bool,
        weights: WeightHome,
        states: StateHome,
        gradients: GradientHome,
    ) -> None:
        self.param_groups = groups
        self._device, self._accumulate = device, accumulate
        self._weights, self._states, self._gradients = weights, states, gradients
        self._module = device_module(device)
        self._compute, self._d2h = self._module.current_stream(), self._module.Stream()
        self._slots: dict[nn.Parameter, _Slot] = {}
        for group in groups:
            for weight in group["params"]:
                self._slots[weight] = _Slot(0, weight, group)
        # In the model's order, which is that of the forward pass.
        self._order: list[_Slot] = []
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0
        self._final = True
        self._next = 0
        self._factor: Tensor | None = None
        self._scratch = torch.empty(0, device="cpu")

    def start(self, order: Iterable[nn.Parameter]) -> None:
        """Take the weights as they are. `order` is that in which forward reads them."""
        self._order = [self._slots[weight] for weight in order if weight in self._slots]
        self._next = len(self._order)
        for number, slot in enumerate(self._order):
            slot.number = number
            self._add(slot)
            hook = partial(self._on_gradient, slot)
            slot.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        largest = max(
            slot.weight.numel() * gradient_dtype(slot.weight).itemsize for slot in self._order
        )
        self._under_way_bytes = 2 * largest

    def _add(self, slot: _Slot) -> None:
        host = self._weights.read(slot.weight)
        settings = {key: value for key, value in slot.group.items() if key != "params"}
        self._gradients.add(host.numel(), gradient_dtype(slot.weight))
        self._states.add(host.float().view(slot.weight.shape), settings)

    # Backward: gradients leave

    def begin(self, final: bool, learns: bool) -> None:
        self._final = final

    @torch.no_grad()
    def _on_gradient(self, slot: _Slot, weight: nn.Parameter) -> None:
        if self._final or self._accumulate:
            self._leave(slot)

    def _leave(self, slot: _Slot) -> None:
        gradient, slot.weight.grad = slot.weight.grad, None
        assert gradient is not None
        self.ready([slot.weight])  # a step that still needs the buffer
        first, slot.filled = not slot.filled, True
        whole = first and self._final
        slot.norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) if whole else None
        landing = self._gradients.landing(slot.number, first)
        self._d2h.wait_event(recorded(self._module, self._compute))
        with self._module.stream(self._d2h):
            landing.view(gradient.shape).copy_(gradient, non_blocking=True)
        slot.arrived = recorded(self._module, self._d2h)
        self._leaving.append(_Leaving(slot, gradient, landing, first, slot.arrived))
        self._leaving_bytes += gradient.nbytes
        while self._leaving_bytes > self._under_way_bytes:
            self._land()

    def _land(self) -> None:
        """Let the oldest gradient go, when it has been copied."""
        leaving = self._leaving.popleft()
        self._leaving_bytes -= leaving.gradient.nbytes
        self._compute.wait_event(leaving.copied)
        self._gradients.landed(leaving.slot.number, leaving.landing, leaving.first, leaving.copied)

    def norms(self) -> dict[nn.Parameter, Tensor]:
        self.settle()
        for slot in self._order:
            if slot.weight.grad is not None:
                self._leave(slot)
        while self._leaving:
            self._land()
        return {slot.weight: self._norm(slot) for slot in self._order if slot.filled}

    def _norm(self, slot: _Slot) -> Tensor:
        if slot.norm is None:
            slot.arrived.synchronize()
            slot.norm = self._gradients.norm(slot.number).to(self._device)
        return slot.norm

    # The step, put off until the weights are read

    def step(self, factor: Tensor | None, skip: Tensor, again: Callable[[], object]) -> None:
        self._factor = None if factor is None else factor.to("cpu")
        if skip.to("cpu").item():
            self._forget()
            return
        for slot in self._order:
            slot.lr = slot.group["lr"]
        self._next = 0

    def _forget(self) -> None:
        for slot in self._order:
            slot.filled, slot.norm = False, None

    def ready(self, weights: Iterable[nn.Parameter]) -> None:
        """The compute stream reads these (and those before them) no earlier than their new values are there."""
        slots = [self._slots[weight].number for weight in weights if weight in self._slots]
        while self._next <= max(slots, default=-1):
            self._next += 1
            self._step(self._order[self._next - 1])

    def is_due(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether `ready` would change one of them."""
        slots = (self._slots[weight] for weight in weights if weight in self._slots)
        return any(slot.filled and slot.number >= self._next for slot in slots)

    def settle(self) -> None:
        self.ready(self._slots)

    @torch.no_grad()
    def _step(self, slot: _Slot) -> None:
        if not slot.filled:
            return
        slot.arrived.synchronize()
        gradient = partial(self._scaled_piece, slot.number)
        with torch.autocast("cpu", enabled=False):  # forward passes call it from their midst
            for start, values in self._states.step(slot.number, slot.lr, gradient):
                self._weights.write(slot.weight, start, values)
        self._weights.written(slot.weight)
        slot.filled, slot.norm = False, None

    def _scaled_piece(self, number: int, start: int, stop: int) -> Tensor:
        """Factor x gradient in fp32."""
        gradient = self._gradients.piece(number, start, stop)
        if gradient.dtype != torch.float32:
            gradient = self._converted(gradient)
        if self._factor is not None and self._factor.item() != 1:
            gradient.mul_(self._factor)
        return gradient

    def _converted(self, gradient: Tensor) -> Tensor:
        """In fp32, until the next one. New memory for each would take the host longer to map than to fill."""
        if self._scratch.numel() < gradient.numel():
            self._scratch = torch.empty(gradient.numel(), device="cpu")
        return self._scratch[: gradient.numel()].copy_(gradient)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        self.settle()
        return self._states.state(self._slots[parameter].number)

    def load_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        self._states.load_state(self._slots[parameter].number, state)


def tell_before_reading(
    model: LanguageModel, ready: Callable[[Iterable[nn.Parameter]], None]
) -> None:
    """Call `ready` with the weights of embedding, every segment and head, each just before they are read."""
    front = model.front_parameters()
    back = [*model.norm.parameters(), *model.head.parameters()]
    model.register_forward_pre_hook(lambda *_: ready(front))
    model.norm.register_forward_pre_hook(lambda *_: ready(back))
    for index, segment in enumerate(model.segments):
        model.segments[index] = _told(segment, model.segment_parameters(segment), ready)


def _told(
    segment: Segment, weights: list[nn.Parameter], ready: Callable[[Iterable[nn.Parameter]], None]
) -> Segment:
    def run(x: Tensor, *shared: Any) -> Tensor:
        ready(weights)
        return segment(x, *shared)

    return Segment(segment.blocks, run)
