"""What a segment saves for backward waits in host memory; the copies run beside the computation.

Saved-tensor hooks (torch.autograd.graph) see what autograd keeps. Who waits for whom:

    compute   segment 0 | segment 1 | segment 2 ...      ... backward 2 | backward 1 | backward 0
    d2h             copy 0 .. | copy 1 .. |
    h2d                                                  fetch 1 ..... | fetch 0 ..

- A copy to the host waits for what was launched before its tensor was packed.
- The device tensors of a segment are let go when the next segment has run and the compute stream waits for their
  copies. Their blocks are then free for the compute stream at once: `record_stream` would hold them until the host,
  which runs ahead, happens to see the event. A slow link holds the computation up instead of filling the device.
- A fetch takes device memory of the compute stream and waits for what that stream has launched so far, which is
  after the copies to the host; the compute stream waits for the fetch before it reads, or lets go of, what came.
- So whatever is launched on the compute stream after a buffer was given back is ordered after all that was read from
  it, and with it the next copy into it.
"""

import warnings
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memtrain.device import device_module, pinned_empty
from memtrain.model.language_model import Segment

_Key = tuple[int, int]
"""A living storage, and the version of its content."""


class _HostPool:
    """Flat buffers in host memory, reused by type and size: as many as were in use at one time."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.can_pin = True
        self.free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)  # ordered by size

    def take(self, n_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest free buffer that is large enough; a new one replaces one that is too small."""
        free = self.free[dtype]
        place = bisect_left(free, n_elements, key=Tensor.numel)
        if place < len(free):
            return free.pop(place)
        if free:
            self.total_bytes -= free.pop().nbytes
        buffer = self._new(n_elements, dtype, device)
        self.total_bytes += buffer.nbytes
        return buffer

    def _new(self, n_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Pageable once the machine has refused pinned memory: each copy then holds the host up, no more."""
        if self.can_pin:
            try:
                return pinned_empty(n_elements, dtype, device)
            except RuntimeError as error:
                self.can_pin = False
                warnings.warn(
                    f"offloaded activations: no pinned memory ({str(error).splitlines()[0]}); "
                    "pageable memory is used, whose copies are slower",
                    stacklevel=2,
                )
        return torch.empty(n_elements, dtype=dtype, device="cpu")

    def give(self, buffer: Tensor) -> None:
        insort(self.free[buffer.dtype], buffer, key=Tensor.numel)


class _Moved:
    """The content of one storage, flat. It lives as long as something in the graph may ask for it."""

    def __init__(self, source: Tensor, pool: _HostPool) -> None:
        self.on_device: Tensor | None = source
        self.n_elements, self.dtype = source.numel(), source.dtype
        self._pool = pool
        self._wait: Callable[[], None] | None = None
        self._buffer: Tensor | None = None  # `__del__` looks at it even where there is no memory
        self._buffer = pool.take(self.n_elements, self.dtype, source.device)

    @property
    def host(self) -> Tensor:
        assert self._buffer is not None, "backward of a forward pass that another one has followed"
        return self._buffer[: self.n_elements]

    def arrive(self, on_device: Tensor, wait: Callable[[], None]) -> None:
        """`on_device` is being copied; `wait` makes the compute stream wait for that."""
        self.on_device, self._wait = on_device, wait

    def settle(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def drop(self) -> None:
        self.settle()  # nobody may get the device memory while it is being copied
        self.on_device = None
        if self._buffer is not None:
            self._pool.give(self._buffer)
            self._buffer = None

    def __del__(self) -> None:
        self.drop()


@dataclass(eq=False)
class _Call:
    """One run of a segment. The graph alone keeps what was moved alive."""

    compute: Any
    device: torch.device
    stays: set[int]
    """Storages that are on the device anyway."""
    previous: "_Call | None"
    """The segment before it in the same forward pass."""
    moved: "weakref.WeakValueDictionary[_Key, _Moved]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    copied: Any = None
    """Event: all of it is on the host."""


@dataclass(frozen=True, eq=False)
class _View:
    """How to make the saved tensor again from the content of its storage."""

    call: _Call
    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class ActivationOffload:
    """Wraps the segments of one model, in their order. Gradients are bit-equal: only bytes are copied.

    One forward pass at a time: its backward comes before the next one begins. Wrap what is recomputed, and do not
    recompute what is wrapped.

    Parameters, buffers, storages under `min_bytes` and what lives on another device stay. On a device that is not the
    CPU the host memory is pinned where that can be had. `moved_bytes` counts what went to the host since it was made.
    """

    def __init__(self, model: nn.Module, min_bytes: int) -> None:
        self.moved_bytes = 0
        self._min_bytes = max(1, min_bytes)
        self._resident = [*model.parameters(), *model.buffers()]
        self._pool = _HostPool()
        self._n_segments = 0
        self._last: _Call | None = None
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    @property
    def host_bytes(self) -> int:
        """What its buffers take: as much as one forward pass moves, however many steps follow."""
        return self._pool.total_bytes

    def wrap(self, segment: Segment, keep: bool = False) -> Segment:
        """`segment` with its saved tensors on the host. With `keep` they stay: right for the last, used at once."""
        is_first, self._n_segments = self._n_segments == 0, self._n_segments + 1

        def run(x: Tensor, *shared: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return segment(x, *shared)
            call = self._begin(x, shared, is_first)
            pack = partial(self._pack, call)
            with nullcontext() if keep else saved_tensors_hooks(pack, self._unpack):
                y = segment(x, *shared)
            self._end(call)
            if y.requires_grad:
                y.register_hook(partial(self._fetch_ahead, call))  # type: ignore[no-untyped-call]
            return y

        return Segment(segment.blocks, run)

    # Forward

    def _begin(self, x: Tensor, shared: tuple[Any, ...], is_first: bool) -> _Call:
        if is_first:
            self._drop_unfinished()
        previous = self._last
        stays = previous.stays if previous is not None else self._resident_storages()
        every_segment_has = (value for value in shared if isinstance(value, Tensor))
        stays.update(tensor.untyped_storage()._cdata for tensor in every_segment_has)
        compute = device_module(x.device).current_stream()
        return _Call(compute, x.device, stays, previous)

    def _drop_unfinished(self) -> None:
        """Take back what the last forward pass still holds: a backward that failed leaves nodes in autograd's queue."""
        while self._last is not None:
            for moved in list(self._last.moved.values()):
                moved.drop()
            self._last = self._last.previous

    def _resident_storages(self) -> set[int]:
        return {tensor.untyped_storage()._cdata for tensor in self._resident}

    def _pack(self, call: _Call, tensor: Tensor) -> Tensor | _View:
        if tensor.device != call.device or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or storage._cdata in call.stays:
            return tensor
        key = (storage._cdata, tensor._version)
        moved = call.moved[key] = self._find(call, key) or self._move(call, tensor.detach())
        return _View(
            call, moved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def _find(self, call: _Call, key: _Key) -> _Moved | None:
        """What is under way already, for this segment or the one before: its storage still lives."""
        for candidate in (call, call.previous):
            moved = candidate.moved.get(key) if candidate is not None else None
            if moved is not None and moved.on_device is not None:
                return moved
        return None

    def _move(self, call: _Call, tensor: Tensor) -> _Moved:
        n_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        source = tensor.as_strided((n_elements,), (1,), 0)
        moved = _Moved(source, self._pool)
        to_host, _ = self._copy_streams(call.device)
        to_host.wait_event(call.compute.record_event())
        with device_module(call.device).stream(to_host):
            moved.host.copy_(source, non_blocking=True)
        # It may be dropped before `_end` has waited: by a forward pass that fails, or the last segment's backward.
        moved.arrive(source, partial(call.compute.wait_event, to_host.record_event()))
        self.moved_bytes += source.nbytes
        return moved

    def _end(self, call: _Call) -> None:
        """The segment before has had this one's time to copy: let its device tensors go."""
        to_host, _ = self._copy_streams(call.device)
        call.copied = to_host.record_event()
        if call.previous is not None and call.previous.moved:
            call.compute.wait_event(call.previous.copied)
            for moved in call.previous.moved.values():
                moved.on_device = None
        self._last = call

    def _copy_streams(self, device: torch.device) -> tuple[Any, Any]:
        """To the host and back: the link carries both directions at once."""
        if device not in self._streams:
            module = device_module(device)
            self._streams[device] = module.Stream(), module.Stream()
        return self._streams[device]

    # Backward

    def _fetch_ahead(self, call: _Call, grad: Tensor) -> None:
        """The backward of `call` begins, as the gradient of its output is there."""
        self._fetch(call)
        if call.previous is not None:
            self._fetch(call.previous)

    def _fetch(self, call: _Call) -> None:
        """Start the copies back, those first that backward needs first."""
        wanted = [m for m in reversed(list(call.moved.values())) if m.on_device is None]
        if not wanted:
            return
        arriving = [torch.empty(m.n_elements, dtype=m.dtype, device=call.device) for m in wanted]
        _, to_device = self._copy_streams(call.device)
        to_device.wait_event(call.compute.record_event())
        with device_module(call.device).stream(to_device):
            for moved, tensor in zip(wanted, arriving, strict=True):
                tensor.copy_(moved.host, non_blocking=True)
        wait = partial(call.compute.wait_event, to_device.record_event())
        for moved, tensor in zip(wanted, arriving, strict=True):
            moved.arrive(tensor, wait)

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved = packed.moved
        if moved.on_device is None:
            self._fetch(packed.call)
        moved.settle()
        assert moved.on_device is not None
        flat = moved.on_device
        if flat.dtype != packed.dtype:
            flat = flat.view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, packed.offset)
