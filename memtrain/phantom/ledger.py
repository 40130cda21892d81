"""Every storage there was: where, how large, from when to when, and made by what."""

from __future__ import annotations

import mmap
import re
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from memtrain.phantom.allocator import Block, CachingAllocator, allocator_settings
from memtrain.units import MIB

PHASES = ("forward", "backward", "optimizer", "other")
FORWARD, BACKWARD, OPTIMIZER, OTHER = PHASES

DEVICE, PAGEABLE, PINNED = "device", "pageable", "pinned"


def pinned_block_bytes(size_bytes: int) -> int:
    """What torch takes for a pinned buffer: a power of two (ATen/core/CachingHostAllocator.h), but for those above
    thresholds that the allocator's settings may name (from torch 2.13 on).
    """
    named = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)", allocator_settings())
    if not size_bytes or any(size_bytes > int(threshold) * MIB for threshold in named):
        return size_bytes
    return int(2 ** (size_bytes - 1).bit_length())


def page_bytes(size_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Span(NamedTuple):
    """A stretch of one phase. Spans in a row of the same phase have the same `run`."""

    event: int
    phase: str
    repeated: bool
    """A forward that backward repeats (recomputation)."""
    run: int


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows what it stood for."""

    __slots__ = ("record",)
    record: Record


@dataclass(eq=False, slots=True)
class Record:
    """One storage, or one block a kernel took for itself.

    `category` is None until something says what it is; the report then goes by its life:
    `born` and `died` number the spans (stretches of one phase) in which it was made and freed.
    """

    space: str
    asked_bytes: int
    size_bytes: int
    op: str
    module: str
    born: int
    stream: int
    died: int | None = None
    category: str | None = None
    block: Block | None = None
    key: int = 0
    ref: StorageRef | None = None
    users: frozenset[int] = frozenset()  # other streams, by `record_stream`
    write_stream: int = 0
    write_tick: int = 0
    readers: dict[int, int] | None = None  # streams and their ticks, since the last write

    def uses(self) -> dict[int, int]:
        """The streams whose work on it is not known to be over, and the last tick of each."""
        return {self.write_stream: self.write_tick, **(self.readers or {})}


class Ledger:
    """All allocations and frees in order. `allocator=None` counts raw bytes."""

    def __init__(self, allocator: CachingAllocator | None) -> None:
        self.allocator = allocator
        self.pinned_bytes = pinned_block_bytes
        """What a pinned buffer of so many bytes takes."""
        self.events: list[tuple[Record, int]] = []
        self.spans: list[Span] = [Span(0, OTHER, False, 0)]
        self.steps: list[int] = [0]
        """First event of each step."""
        self.live = {DEVICE: 0, PAGEABLE: 0, PINNED: 0}
        self.peak = dict(self.live)
        self.known: dict[int, Record] = {}
        self.dead: deque[Any] = deque()
        self._bury = self.dead.append

    def enter_span(self, phase: str, repeated: bool) -> None:
        """From the next event on the phase is `phase`."""
        last = self.spans[-1]
        run = last.run + (phase != last.phase)
        if phase == BACKWARD and last.phase == OPTIMIZER and self.spans[-2].phase == BACKWARD:
            run = self.spans[-2].run  # an optimizer that steps in backward does not end it
        self.spans.append(Span(len(self.events), phase, repeated, run))

    def allocate(self, space: str, size_bytes: int, op: str, module: str, stream: int) -> Record:
        """A new record. Raises OutOfMemoryError, and has then changed nothing."""
        if space == PINNED:
            size_bytes = self.pinned_bytes(size_bytes)
        born = len(self.spans) - 1
        record = Record(space, size_bytes, size_bytes, op, module, born, stream)
        if not size_bytes:
            return record
        if space == DEVICE and self.allocator is not None:
            record.block = self.allocator.malloc(size_bytes, stream)
            record.size_bytes = record.block.size_bytes
        self.events.append((record, record.size_bytes))
        live = self.live[space] + record.size_bytes
        self.live[space] = live
        if live > self.peak[space]:
            self.peak[space] = live
        return record

    def watch(self, record: Record, storage: Any) -> None:
        """`record` ends when `storage` does."""
        record.ref = StorageRef(storage, self._bury)
        record.ref.record = record
        record.key = storage._cdata
        self.known[record.key] = record

    def find(self, storage: Any) -> Record | None:
        record = self.known.get(storage._cdata)
        if record is None or record.ref is None or record.ref() is None:
            return None
        return record

    def of(self, t: Any) -> Record | None:
        """The record of a tensor's storage, if it has one."""
        return self.find(t.untyped_storage())

    def is_pinned(self, t: Any) -> bool:
        record = self.of(t)
        return record is not None and record.space == PINNED

    def free(self, record: Record, keep_active: bool = False) -> None:
        if self.known.get(record.key) is record:
            del self.known[record.key]
        record.ref = record.readers = None
        record.died = len(self.spans) - 1
        if not record.size_bytes:
            return
        self.events.append((record, -record.size_bytes))
        self.live[record.space] -= record.size_bytes
        if record.block is not None:
            assert self.allocator is not None
            self.allocator.free(record.block, keep_active)

    def reset_peak(self) -> None:
        self.peak = dict(self.live)
        if self.allocator is not None:
            self.allocator.reset_peaks()
