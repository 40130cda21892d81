"""Looks for races: memory that is used, or freed, before another stream is done with it.

From the second stream on these are reported:

- an operator, or the host, reads what another stream writes;
- it writes what another stream writes or reads: tensors on the device, and pinned memory;
- device memory is freed while another stream uses it, `record_stream` has not named that stream,
  and the stream that took the memory runs its next operator without having waited.

Not reported: what was launched before the second stream was made; what an operator writes that its
schema does not name; how long anything takes. Pinned memory may be freed at any time: torch's
allocator waits for the copies. The parts of a storage are not told apart, and autograd orders the
stream that runs backward after all others when it begins and when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from memtrain.phantom.arguments import flat_tensors, result_tensors, written_arguments
from memtrain.phantom.dispatch import TRANSFERS, Entry
from memtrain.phantom.failures import Failures, RaceError
from memtrain.phantom.ledger import Ledger, Record
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.streams import HOST, Schedule, merge

aten = torch.ops.aten


@dataclass(eq=False)
class Races:
    """Checks an operator against the clocks before it runs (`check`), and notes it after (`note`)."""

    device_type: str
    ledger: Ledger
    schedule: Schedule
    watch: ModuleWatch
    failures: Failures
    _freed_early: list[tuple[Record, dict[int, int]]] = field(default_factory=list)

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        inputs = flat_tensors(args, kwargs)
        on_device = any(t.device.type == self.device_type for t in inputs)
        user = self.schedule.current.stream_id if on_device else HOST
        operator, overwritten = str(func), _overwritten(func, args, kwargs)
        for t in inputs:
            check = self._check_write if id(t) in overwritten else self.check_read
            check(t, user, operator)

    def check_read(self, t: Any, reader: int, operator: str) -> None:
        record = self.ledger.of(t)
        if record is None:
            return
        writer, tick = record.write_stream, record.write_tick
        if not self.schedule.happened(reader, writer, tick):
            self._race(operator, reader, f"reads {_said(record, t)} that stream {writer} writes")

    def _check_write(self, t: Any, writer: int, operator: str) -> None:
        record = self.ledger.of(t)
        if record is None:
            return
        for user in self._unfinished(record, writer):
            does = "reads" if user in (record.readers or ()) else "writes"
            self._race(operator, writer, f"writes {_said(record, t)} that stream {user} {does}")

    def _unfinished(self, record: Record, waiting: int) -> dict[int, int]:
        """Streams whose last use of `record` the stream `waiting` is not ordered after, and its tick."""
        return {
            user: tick
            for user, tick in record.uses().items()
            if not self.schedule.happened(waiting, user, tick)
        }

    def _race(self, operator: str, user: int, what: str) -> None:
        who = "the host" if user == HOST else f"stream {user}"
        self._fail(
            f"{operator}{self.watch.where}: {who} {what}, and has not waited for it: "
            "wait_stream, wait_event or synchronize first"
        )

    def _fail(self, message: str) -> None:
        self.failures.fail(RaceError(message))

    def freed(self, record: Record) -> None:
        """`record` is about to be freed, maybe while streams that the allocator does not know of use it."""
        if record.block is None or not self.schedule.tracking:
            return
        unfinished = self._unfinished(record, record.stream)
        early = {user: tick for user, tick in unfinished.items() if user not in record.users}
        if early:
            self._freed_early.append((record, early))

    def note(self, entry: Entry, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The operator's tick on its stream, noted at what it read and wrote."""
        written = result_tensors(out) + written_arguments(func, args, kwargs)
        if not entry.on_device:
            self._note_writes(written, HOST, 0)
            return
        stream = self.schedule.current
        if self._freed_early:
            self._check_reuse(stream.stream_id, str(func))
        tick = self.schedule.tick(stream)
        if entry.kind in TRANSFERS and not self._is_async(func, args, kwargs, out):
            merge(self.schedule.host, stream.clock)
        for t in flat_tensors(args, kwargs):
            record = self.ledger.of(t)
            if record is not None:
                record.readers = record.readers or {}
                record.readers[stream.stream_id] = tick
        self._note_writes(written, stream.stream_id, tick)

    def _check_reuse(self, owner: int, operator: str) -> None:
        """What was freed too early goes to the next operator of the stream that took it."""
        due = [freed for freed in self._freed_early if freed[0].stream == owner]
        self._freed_early = [freed for freed in self._freed_early if freed[0].stream != owner]
        for record, early in due:
            for user, tick in early.items():
                if not self.schedule.happened(owner, user, tick):
                    self._fail(
                        f"{operator}{self.watch.where}: stream {owner} may get the memory of a tensor "
                        f"of {record.asked_bytes} bytes, made by {record.op}, that was freed while "
                        f"stream {user} uses it: wait_stream or wait_event before it is freed, or "
                        "record_stream"
                    )

    def _is_async(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether a copy returns before it has happened: non_blocking, and to or from pinned memory."""
        non_blocking, ends = kwargs.get("non_blocking", False), (args[0], out)
        if func is aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else non_blocking
            ends = args[:2]
        return bool(non_blocking) and any(self.ledger.is_pinned(t) for t in ends)

    def _note_writes(self, tensors: list[torch.Tensor], stream: int, tick: int) -> None:
        """They came after the reads before them, so whoever waits for them waits for those."""
        for t in tensors:
            record = self.ledger.of(t)
            if record is not None:
                record.write_stream, record.write_tick, record.readers = stream, tick, None


def _said(record: Record, t: torch.Tensor) -> str:
    return f"a {record.space} tensor of shape {list(t.shape)}"


def _overwritten(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Ids of the arguments whose content `func` changes, not only their sizes and strides."""
    if torch.Tag.inplace_view in func.tags:
        return set()
    return {id(t) for t in written_arguments(func, args, kwargs)}
