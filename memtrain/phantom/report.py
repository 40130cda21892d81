"""What a run took: the peak, who held it, what moved and what was computed. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memtrain.phantom.dispatch import Entry
from memtrain.phantom.held import HOST, NOTHING, Moment, peaks
from memtrain.phantom.ledger import PAGEABLE, PHASES, PINNED, Ledger
from memtrain.units import MIB

OpKey = tuple[str, str, str, str, bool]


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

    @property
    def key(self) -> OpKey:
        return self.name, self.phase, self.dtype, self.kind, self.on_device


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
    phases: dict[str, Moment]
    step_peak_bytes: list[int]
    timeline: list[Moment]
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
    host_timeline: list[Moment]
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
    def h2d_bytes(self) -> int:
        return self._moved_bytes("h2d")

    @property
    def d2h_bytes(self) -> int:
        return self._moved_bytes("d2h")

    @property
    def nvme_read_bytes(self) -> int:
        """From files, by operators named `file_read`; written to them by `file_write`."""
        return self._moved_bytes("nvme_read")

    @property
    def nvme_written_bytes(self) -> int:
        return self._moved_bytes("nvme_write")

    def _moved_bytes(self, way: str) -> int:
        return sum(op.moved_bytes for op in self.ops if op.kind == way)

    @property
    def flops(self) -> dict[str, int]:
        """Of the device, by kind: matmul, attention, convolution."""
        found: dict[str, int] = {}
        for op in self.ops:
            if op.flops and op.on_device:
                found[op.kind] = found.get(op.kind, 0) + op.flops
        return found


def used_operators(entries: Iterable[Entry]) -> list[OpUse]:
    """What the calls of `entries` took in all, by phase."""
    totals: dict[OpKey, list[int]] = {}
    for entry in entries:
        for phase, calls in zip(PHASES, entry.calls, strict=True):
            if calls and not entry.views:
                key = (entry.name, phase, entry.dtype, entry.kind, entry.on_device)
                total = totals.setdefault(key, [0, 0, 0])
                total[0] += calls
                total[1] += calls * entry.flops
                total[2] += calls * entry.moved_bytes
    return [OpUse(*key, *total) for key, total in sorted(totals.items())]


def make_report(card: str, ledger: Ledger, fits: bool, ops: list[OpUse]) -> Report:
    phases, timeline, maxima = peaks(ledger)
    top = phases.get(maxima.phase, NOTHING)
    host_phases, host_timeline, host_maxima = peaks(ledger, HOST)
    host_top = host_phases.get(host_maxima.phase, NOTHING)
    allocator = ledger.allocator
    return Report(
        card=card,
        capacity_bytes=allocator.capacity_bytes if allocator else None,
        fits=fits,
        peak_allocated_bytes=top.allocated_bytes,
        peak_active_bytes=allocator.peak_active_bytes if allocator else top.allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes if allocator else top.allocated_bytes,
        end_allocated_bytes=maxima.end_bytes,
        peak_phase=top.phase,
        peak_step=maxima.step_of(top.event) if phases else 0,
        categories=top.categories,
        modules_at_peak=top.modules,
        phases=phases,
        step_peak_bytes=maxima.steps,
        timeline=timeline,
        fragmentation_bytes=allocator.fragmentation_bytes if allocator else 0,
        largest_free_block_bytes=allocator.largest_free_block_bytes if allocator else 0,
        host_peak_bytes=host_top.allocated_bytes,
        host_pageable_peak_bytes=ledger.peak[PAGEABLE],
        host_pinned_peak_bytes=ledger.peak[PINNED],
        host_end_bytes=host_maxima.end_bytes,
        host_peak_phase=host_top.phase,
        host_categories=host_top.categories,
        host_modules=host_top.modules,
        host_timeline=host_timeline,
        ops=ops,
    )
