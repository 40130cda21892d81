"""What a run took: the peak, who held it, what moved and what was computed. Plain data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memtrain.phantom.ledger import (
    BACKWARD,
    DEVICE,
    FORWARD,
    OPTIMIZER,
    PAGEABLE,
    PHASES,
    PINNED,
    Ledger,
    Record,
)
from memtrain.units import MIB

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer_state",
    "weight_copies",
    "activations",
    "temporaries",
    "buffers",
    "workspaces",
    "inputs",
    "other",
)
TIMELINE_POINTS = 1000
HOST = "host"  # pageable and pinned together, where a space is asked for


@dataclass(frozen=True)
class OpUse:
    """All calls of one operator in one phase and compute type, in the last step."""

    name: str
    phase: str
    dtype: str
    kind: str
    """`matmul`, `attention`, `convolution`, `h2d`, `d2h`, `nvme_read`, `nvme_write` or `other`."""
    on_device: bool
    calls: int
    flops: int
    moved_bytes: int
    """Bytes of all inputs and outputs: what a kernel reads and writes at least."""


@dataclass(frozen=True)
class Peak:
    """A moment at which allocated memory was largest."""

    event: int
    phase: str
    allocated_bytes: int
    categories: dict[str, int]
    """Bytes by category; they sum to `allocated_bytes`, as do those of `modules`."""
    modules: dict[str, int]
    """Bytes by path of the module that owns or made them ("" for none)."""


@dataclass(frozen=True)
class TimelinePoint:
    """As Peak."""

    event: int
    phase: str
    allocated_bytes: int
    categories: dict[str, int]
    modules: dict[str, int]


@dataclass(frozen=True)
class Report:
    """A run on the phantom. Peaks are over the whole run; what moved and what was computed is
    that of the last step (`step_boundary` ends one; without it, the whole run is one)."""

    card: str
    capacity_bytes: int | None
    fits: bool
    """Within the capacity, and no OutOfMemoryError left the block."""
    peak_allocated_bytes: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    peak_phase: str
    peak_step: int
    categories: dict[str, int]
    modules_at_peak: dict[str, int]
    phases: dict[str, Peak]
    step_peak_bytes: list[int]
    timeline: list[TimelinePoint]
    fragmentation_bytes: int
    """Reserved but not active at the end, and the largest free block of it."""
    largest_free_block_bytes: int
    host_peak_bytes: int
    host_pageable_peak_bytes: int
    host_pinned_peak_bytes: int
    host_end_bytes: int
    host_peak_phase: str
    host_categories: dict[str, int]
    """Bytes by category when pageable and pinned memory together were largest; `host_modules` by module path."""
    host_modules: dict[str, int]
    host_timeline: list[TimelinePoint]
    h2d_bytes: int
    d2h_bytes: int
    nvme_read_bytes: int
    """From files and to them, by operators named `file_read` and `file_write`."""
    nvme_written_bytes: int
    ops: list[OpUse]

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        peaks = (self.peak_allocated_bytes, self.peak_active_bytes, self.peak_reserved_bytes)
        allocated, active, reserved = (f"{size / MIB:.1f} MiB" for size in peaks)
        lines = [
            f"{self.card}: {fits}",
            f"peak in {self.peak_phase}: {allocated} allocated, {active} active, {reserved} reserved",
        ]
        by_size = sorted(self.categories.items(), key=lambda item: -item[1])
        lines += [f"  {name}: {size / MIB:.1f} MiB" for name, size in by_size]
        return "\n".join(lines)

    @property
    def flops(self) -> dict[str, int]:
        """Of the device, by kind: matmul, attention, convolution."""
        found: dict[str, int] = {}
        for op in self.ops:
            if op.flops and op.on_device:
                found[op.kind] = found.get(op.kind, 0) + op.flops
        return found


def category_of(record: Record, ledger: Ledger) -> str:
    """What `record` was. What nothing marked is told by its life.

    Made in forward (or in a forward that backward repeats) and still there when it ended: kept
    for backward. Made in an optimizer step and kept: its state. Made in backward and kept: the
    gradient of a tensor that no module holds. Freed in the phase it was made in: temporary.
    Made between phases and freed by backward: kept for it (a loss outside any module).
    """
    if record.category is not None and record.category != "inputs":
        return record.category
    born = ledger.spans[record.born]
    died = None if record.died is None else ledger.spans[record.died]
    if born.repeated:
        return "temporaries" if record.died == record.born else "activations"
    if died is not None and died.run == born.run:
        return "temporaries"
    if born.phase == FORWARD:
        return "activations"
    if born.phase == OPTIMIZER:
        return "optimizer_state" if died is None else "temporaries"
    if born.phase == BACKWARD:
        return "gradients"
    if record.category is None and died is not None and died.phase == BACKWARD:
        return "activations"
    return "inputs" if record.category == "inputs" else "other"


def walk(ledger: Ledger, space: str = DEVICE) -> Iterator[TimelinePoint]:
    """What is held after every event; the same two dicts each time, updated, with zeros in them."""
    held = dict.fromkeys(CATEGORIES, 0)
    modules: dict[str, int] = {}
    total = 0
    for event, phase, record, change in _events(ledger, space):
        total += change
        held[category_of(record, ledger)] += change
        modules[record.module] = modules.get(record.module, 0) + change
        yield TimelinePoint(event, phase, total, held, modules)


def _events(ledger: Ledger, space: str) -> Iterator[tuple[int, str, Record, int]]:
    span = 0
    spans = ledger.spans
    spaces = (PAGEABLE, PINNED) if space == HOST else (space,)
    for event, (record, change) in enumerate(ledger.events):
        while span + 1 < len(spans) and spans[span + 1].event <= event:
            span += 1
        if record.space in spaces:
            yield event, spans[span].phase, record, change


class _Maxima:
    """Where allocated memory was largest: overall, by phase and by step."""

    def __init__(self, ledger: Ledger, space: str) -> None:
        self.bytes = dict.fromkeys(PHASES, 0)
        self.event = dict.fromkeys(PHASES, 0)
        self.steps = [0] * len(ledger.steps)
        self.end_bytes = 0
        self.count = 0
        total = 0
        step = 0
        for event, phase, _, change in _events(ledger, space):
            total += change
            self.count += 1
            while step + 1 < len(ledger.steps) and ledger.steps[step + 1] <= event:
                step += 1
                self.steps[step] = total - change  # what the step before left
            if change > 0 and total > self.bytes[phase]:
                self.bytes[phase], self.event[phase] = total, event
            self.steps[step] = max(self.steps[step], total)
        self.end_bytes = total
        self.phase = max(PHASES, key=lambda phase: self.bytes[phase])
        self._step_starts = ledger.steps

    def step_of(self, event: int) -> int:
        return bisect_right(self._step_starts, event) - 1


def peaks(
    ledger: Ledger, space: str = DEVICE
) -> tuple[dict[str, Peak], list[TimelinePoint], _Maxima]:
    """The peak of each phase that has one, and the timeline with a point for each of them."""
    maxima = _Maxima(ledger, space)
    wanted = {maxima.event[phase]: phase for phase in PHASES if maxima.bytes[phase]}
    every = max(1, maxima.count // TIMELINE_POINTS)
    found: dict[str, Peak] = {}
    timeline = []
    for number, now in enumerate(walk(ledger, space)):
        if now.event not in wanted and number % every:
            continue
        held, modules = _filled(now.categories), _filled(now.modules)
        timeline.append(replace(now, categories=held, modules=modules))
        if now.event in wanted:
            peak = Peak(now.event, now.phase, now.allocated_bytes, held, modules)
            found[wanted[now.event]] = peak
    return found, timeline, maxima


def held_now(ledger: Ledger) -> dict[str, int]:
    """Bytes by category of what is live."""
    held = dict.fromkeys(CATEGORIES, 0)
    for _, _, record, change in _events(ledger, DEVICE):
        held[category_of(record, ledger)] += change
    return _filled(held)


def _filled(held: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in held.items() if size}
