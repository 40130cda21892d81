"""Weights live on the host; the device holds those of the block that runs and of the one that runs next.

    h2d        weights 1 | weights 2 | ...                ... weights 1 | weights 0
    compute    forward 0 | forward 1 | ...    ... backward 2 | backward 1 | backward 0

A parameter keeps its tensor, whose storage is emptied and filled again (as FSDP does it): what autograd saved of it in
forward is the weight again in backward. Room for the next weights is taken before a block is launched, and their copy
waits only for what was launched before that; so it runs beside the block. Parameters with one dimension stay: they are
small.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memtrain.device import device_module, pinned_empty, recorded
from memtrain.model.language_model import LanguageModel, Segment


class WeightStore(Protocol):
    """Holds the weights on the host (in memory or in files)."""

    def put(self, weight: nn.Parameter) -> None:
        """Know a weight and take its values."""

    def prepare(self, weight: nn.Parameter) -> None:
        """It will be asked for soon."""

    def get(self, weight: nn.Parameter) -> Tensor:
        """Its values, flat, on the host, until `done`."""

    def done(self, weight: nn.Parameter, copied: Any) -> None:
        """Nothing reads what `get` gave once the event `copied` has happened."""

    def read(self, weight: nn.Parameter) -> Tensor:
        """Its values, flat, on the host."""

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        """New values from flat index `start` on."""


class ResidentWeights(Protocol):
    """Writes weights that are on the device."""

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None: ...
    def written(self, weight: nn.Parameter) -> None: ...


class MemoryWeights:
    """Weights in host memory, pinned for a device that is not the CPU; also what a host optimizer reads and writes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[nn.Parameter, Tensor] = {}

    def put(self, weight: nn.Parameter) -> None:
        host = pinned_empty(weight.numel(), weight.dtype, self._device)
        self._host[weight] = host.copy_(weight.detach().view(-1))

    def prepare(self, weight: nn.Parameter) -> None:
        """It is there."""

    def get(self, weight: nn.Parameter) -> Tensor:
        return self._host[weight]

    def done(self, weight: nn.Parameter, copied: Any) -> None:
        """It stays."""

    def read(self, weight: nn.Parameter) -> Tensor:
        """Not a copy: an fp32 weight serves as its own master."""
        return self._host[weight]

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        target = self._host[weight][start : start + piece.numel()]
        if target.untyped_storage()._cdata != piece.untyped_storage()._cdata:
            target.copy_(piece)


@dataclass(eq=False)
class _Stage:
    """What is on the device together."""

    weights: list[nn.Parameter]
    reads: list[nn.Parameter]
    """With those that stay on the device."""
    present: bool = False
    room: Any = None
    """Event: whoever had the memory before is done with it."""
    arrived: Any = None


class ParamOffload:
    """Keeps the matrices of one model in `store`. `place` takes them one by one, as they are made; `wrap` comes last.

    `before_read` is told which weights are about to be read by the device, `is_due` asked whether it would change them.
    `resident` writes those that stay there.
    """

    def __init__(self, device: torch.device, store: WeightStore) -> None:
        self.before_read: Callable[[Iterable[nn.Parameter]], None] = lambda weights: None
        self.is_due: Callable[[Iterable[nn.Parameter]], bool] = lambda weights: False
        self.resident: ResidentWeights | None = None
        self._store = store
        self._module = device_module(device)
        self._compute, self._h2d = self._module.current_stream(), self._module.Stream()
        self._stages: list[_Stage] = []

    def place(self, weight: nn.Parameter) -> None:
        """Move a weight that is on the device to the host."""
        if weight.ndim >= 2:
            self._store.put(weight)
            weight.untyped_storage().resize_(0)

    def wrap(self, model: LanguageModel) -> None:
        """Embedding, every segment and head become stages, fetched when their turn comes."""
        reads = [model.front_parameters(), *map(model.segment_parameters, model.segments)]
        reads[-1] += model.norm.parameters()
        reads.append(list(model.head.parameters()))
        self._stages = [_Stage([p for p in read if p.ndim >= 2], read) for read in reads]
        model.elsewhere = self
        for index, segment in enumerate(model.segments):
            model.segments[index] = self._wrapped(segment, index + 1)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    # Forward

    def _begin(self, model: nn.Module, args: Any) -> None:
        for stage in self._stages:  # what evaluation, or a backward that failed, has left
            self._release(stage)
        self._use(0)
        self._take_room(1)

    def _wrapped(self, segment: Segment, number: int) -> Segment:
        def run(x: Tensor, *shared: Any) -> Tensor:
            self._copy(number)
            self._release(self._stages[number - 1])
            self._use(number)
            self._take_room(number + 1)
            y = segment(x, *shared)
            if number == 1 and x.requires_grad:
                x.register_hook(lambda grad: self._release(self._stages[1]))  # type: ignore[no-untyped-call]
            if y.requires_grad:
                y.register_hook(lambda grad: self._backward(number))  # type: ignore[no-untyped-call]
            return y

        return Segment(segment.blocks, run)

    def _end(self, model: nn.Module, args: Any, hidden: Tensor) -> None:
        """The head belongs to the loss, which is next."""
        last = len(self._stages) - 1
        self._use(last)
        self._release(self._stages[last - 1])
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._turn())  # type: ignore[no-untyped-call]

    # Backward

    def _turn(self) -> None:
        """The loss has been differentiated."""
        self._release(self._stages[-1])
        self._fetch(len(self._stages) - 2)

    def _backward(self, number: int) -> None:
        """The backward of a segment begins."""
        if number + 1 < len(self._stages) - 1:
            self._release(self._stages[number + 1])
        self._use(number)
        if number > 1:
            self._fetch(number - 1)

    # What a host optimizer reads and writes

    def read(self, weight: nn.Parameter) -> Tensor:
        if weight.ndim >= 2:
            return self._store.read(weight)
        return weight.detach().to("cpu", copy=True)

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        if weight.ndim >= 2:
            self._store.write(weight, start, piece)
        else:
            assert self.resident is not None
            self.resident.write(weight, start, piece)

    def written(self, weight: nn.Parameter) -> None:
        if weight.ndim < 2:
            assert self.resident is not None
            self.resident.written(weight)

    # One stage

    def _take_room(self, number: int) -> None:
        stage = self._stages[number]
        if not stage.present:
            due = self.is_due(stage.reads)
            for weight in stage.weights:
                if not due:
                    self._store.prepare(weight)
                weight.untyped_storage().resize_(weight.numel() * weight.itemsize)
            stage.room = recorded(self._module, self._compute)
            stage.present = True

    def _copy(self, number: int) -> None:
        stage = self._stages[number]
        if stage.room is None:
            return
        self.before_read(stage.reads)
        self._h2d.wait_event(stage.room)
        for weight in stage.weights:
            host = self._store.get(weight).view(weight.shape)
            with self._module.stream(self._h2d):
                # .data: not a change that autograd minds
                weight.data.copy_(host, non_blocking=True)
            self._store.done(weight, recorded(self._module, self._h2d))
        stage.room, stage.arrived = None, recorded(self._module, self._h2d)

    def _fetch(self, number: int) -> None:
        self._take_room(number)
        self._copy(number)

    def _use(self, number: int) -> None:
        self._fetch(number)
        stage = self._stages[number]
        if stage.arrived is not None:
            self._compute.wait_event(stage.arrived)
            stage.arrived = None

    def _release(self, stage: _Stage) -> None:
        if not stage.present:
            return
        # Fetched for nothing: nobody may get the memory while it is filled.
        if stage.arrived is not None:
            self._compute.wait_event(stage.arrived)
        for weight in stage.weights:
            weight.untyped_storage().resize_(0)
        stage.present, stage.room, stage.arrived = False, None, None
