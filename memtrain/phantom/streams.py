"""Streams and events of the phantom, which know who waits for whom.

Nothing runs, so nothing can really be late. Instead each stream counts its operators (ticks) and
keeps a vector clock: up to which tick of every other stream its next operator is ordered after.
What is not ordered is a race on a real GPU: `races` looks for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

HOST = -1
"""The host's place in the clocks: it may use only what it has waited for."""

Clock = dict[int, int]  # stream id -> last tick known to have happened


def merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


class Stream(torch.Stream):
    """As `torch.cuda.Stream`. The default stream has id 0."""

    def __new__(
        cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> Stream:
        number = next(_numbers) if stream_id is None else stream_id
        device_type = torch._C._autograd.DeviceType.PrivateUse1.value
        return super().__new__(cls, stream_id=number, device_index=0, device_type=device_type)

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> None:
        self.clock: Clock = {}
        schedule().adopt(self)

    def wait_event(self, event: Any) -> None:
        merge(self.clock, event.clock)
        schedule().ordered()

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        merge(schedule().host, self.clock)
        schedule().ordered()

    def query(self) -> bool:
        self.synchronize()
        return True

    def __enter__(self) -> Stream:
        schedule().adopt(self)
        schedule().stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        schedule().stack.pop()


class Event:
    """As `torch.cuda.Event`, without time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or schedule().current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or schedule().current).wait_event(self)

    def synchronize(self) -> None:
        merge(schedule().host, self.clock)
        schedule().ordered()

    def query(self) -> bool:
        """True: whoever polls an event has then waited for it."""
        self.synchronize()
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0


class Schedule:
    """The streams of one run: their clocks, the host's, and which one is current.

    `tracking` starts with the second stream: what a single stream does is always in order.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.host: Clock = {}
        self.stack: list[Stream] = []
        self.tracking = False
        self.on_order: Any = None
        """Called when somebody has waited: blocks kept for a stream may be let go."""

    @property
    def current(self) -> Stream:
        return self.stack[-1] if self.stack else self.default

    @property
    def default(self) -> Stream:
        return self.streams.get(0) or Stream(stream_id=0)

    def adopt(self, stream: Stream) -> None:
        """Know `stream`, which may have been made before this run."""
        self.streams[stream.stream_id] = stream
        self.tracking = self.tracking or stream.stream_id != 0

    def last_tick(self, number: int) -> int:
        stream = self.streams.get(number)
        return 0 if stream is None else stream.clock.get(number, 0)

    def tick(self, stream: Stream) -> int:
        number = stream.clock.get(stream.stream_id, 0) + 1
        stream.clock[stream.stream_id] = number
        return number

    def happened(self, reader: int, writer: int, tick: int) -> bool:
        """Whether the next operator of `reader` runs after `tick` of `writer`."""
        if reader == writer or writer == HOST or self.host.get(writer, 0) >= tick:
            return True
        return reader in self.streams and self.streams[reader].clock.get(writer, 0) >= tick

    def synchronize(self) -> None:
        for stream in self.streams.values():
            merge(self.host, stream.clock)
        self.ordered()

    def join(self, stream: Stream) -> None:
        """`stream` is after everything launched so far."""
        for other in list(self.streams.values()):
            merge(stream.clock, other.clock)

    def ordered(self) -> None:
        if self.on_order is not None:
            self.on_order()


_numbers = itertools.count(1)
_schedule = Schedule()


def schedule() -> Schedule:
    """The schedule of the run in progress (of none: an idle one)."""
    return _schedule


def use_schedule(new: Schedule) -> Schedule:
    """Make `new` the schedule of the run in progress; returns the one before."""
    global _schedule
    old, _schedule = _schedule, new
    return old
