"""Who owns the bytes: every storage is counted when it is first seen, and until nothing holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memtrain.phantom.allocator import OutOfMemoryError
from memtrain.phantom.failures import Failures
from memtrain.phantom.held import held_now
from memtrain.phantom.ledger import DEVICE, PAGEABLE, PINNED, Ledger, Record
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.races import Races
from memtrain.phantom.streams import Schedule


@dataclass(eq=False)
class Storages:
    """Enters in the ledger what tensors of `mode` take, and what they are."""

    device_type: str
    mode: FakeTensorMode
    ledger: Ledger
    schedule: Schedule
    watch: ModuleWatch
    races: Races
    failures: Failures
    _workspaces: set[tuple[bool, int]] = field(default_factory=set)
    _pending: list[tuple[Record, dict[int, int]]] = field(default_factory=list)

    def see(self, t: Any, op: str, pinned: bool = False) -> None:
        """Count the storage of `t`, which is not known yet."""
        device_type = t.fake_device.type
        if device_type == self.device_type:
            space = DEVICE
        elif device_type == "cpu":
            space = PINNED if pinned else PAGEABLE
        else:
            return
        storage = t.untyped_storage()
        self.ledger.watch(self._allocate(space, storage.nbytes(), op), storage)

    def see_if_new(self, t: Any, op: str, pinned: bool = False) -> None:
        if self.ledger.of(t) is None:
            self.see(t, op, pinned)

    def adopt(self, t: FakeTensor) -> None:
        """Count a tensor that an earlier phantom made as one that was on this one all along."""
        t.fake_mode = self.mode
        self.see_if_new(t, "earlier phantom")

    def _allocate(self, space: str, size_bytes: int, op: str) -> Record:
        stream = self.schedule.current.stream_id if self.schedule.tracking else 0
        try:
            return self.ledger.allocate(space, size_bytes, op, self.watch.path, stream)
        except OutOfMemoryError as error:
            self.watch.mark_all()
            error.by_category = held_now(self.ledger)
            self.failures.fail(error)
        # In backward: counted past the capacity until the error is raised.
        allocator = self.ledger.allocator
        assert allocator is not None
        allocator.enforce = False
        try:
            return self.ledger.allocate(space, size_bytes, op, self.watch.path, stream)
        finally:
            allocator.enforce = True

    def take_temporaries(self, sizes_bytes: list[int], op: str) -> None:
        records = []
        try:
            for size_bytes in sizes_bytes:
                records.append(self._allocate(DEVICE, size_bytes, op))
        finally:
            for record in records:
                self.ledger.free(record)

    def take_workspace(self, size_bytes: int, in_backward: bool) -> None:
        """One cuBLAS workspace per handle (forward's thread, backward's) and stream."""
        stream = self.schedule.current.stream_id if self.schedule.tracking else 0
        handle = (in_backward, stream)
        if handle not in self._workspaces:
            record = self._allocate(DEVICE, size_bytes, "cublas workspace")
            self._workspaces.add(handle)
            record.category, record.module = "workspaces", ""

    def bury(self) -> None:
        """Free the storages that nothing holds any more."""
        dead = self.ledger.dead
        while dead:
            record = dead.popleft().record
            if record.died is None:
                self._free(record)

    def _free(self, record: Record) -> None:
        self.races.freed(record)
        waits_for = {}
        for user in record.users:
            tick = self.schedule.last_tick(user)
            if not self.schedule.happened(record.stream, user, tick):
                waits_for[user] = tick
        self.ledger.free(record, keep_active=bool(waits_for))
        if waits_for:
            self._pending.append((record, waits_for))

    def retire(self, finished: bool = False) -> None:
        """Let go of the blocks whose other streams have been waited for, or have all `finished`."""
        pending, self._pending = self._pending, []
        for record, waits_for in pending:
            happened = (self.schedule.happened(record.stream, s, t) for s, t in waits_for.items())
            if finished or all(happened):
                assert record.block is not None and self.ledger.allocator is not None
                self.ledger.allocator.retire(record.block)
            else:
                self._pending.append((record, waits_for))

    def resized(self, storage: Any) -> None:
        """`storage` may have another size than when it was counted.

        The new block is there before the old one goes: native/cuda/Resize.cpp, `resize_bytes_cuda`.
        """
        record = self.ledger.find(storage)
        size_bytes = storage.nbytes()
        if record is None or size_bytes == record.asked_bytes:
            return
        new = self._allocate(record.space, size_bytes, record.op)
        # Who had the block before is done then.
        new.write_stream, new.write_tick = new.stream, self.schedule.last_tick(new.stream)
        self._free(record)
        new.category, new.module = record.category, record.module
        self.ledger.watch(new, storage)

    def mark(self, t: torch.Tensor, category: str, module: str | None = None) -> None:
        """Say what the storage of `t` is."""
        if type(t) is not FakeTensor:
            for name in _parts_of(t):
                self.mark(getattr(t, name), category, module)
            return
        if t.fake_mode is not self.mode:
            self.adopt(t)
        record = self.ledger.find(t.untyped_storage())
        if record is None or (category == "inputs" and record.category is not None):
            return
        record.category = category
        if module is not None:
            record.module = module

    def record_stream(self, t: Any, stream: Any) -> None:
        record = self.ledger.of(t)
        if record is not None and stream.stream_id != record.stream:
            record.users |= {stream.stream_id}


def _parts_of(t: torch.Tensor) -> list[str]:
    """Attributes of a wrapper subclass (DTensor) that hold its tensors."""
    flatten = getattr(t, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None else []
