"""What is held when, by category and by module: the ledger read from its first event to its last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from memtrain.phantom.ledger import (
    BACKWARD,
    DEVICE,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PAGEABLE,
    PHASES,
    PINNED,
    Ledger,
    Record,
)

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


class Moment(NamedTuple):
    """What is allocated after one event."""

    event: int
    phase: str
    allocated_bytes: int
    categories: dict[str, int]
    """Bytes by category; they sum to `allocated_bytes`, as do those of `modules`."""
    modules: dict[str, int]
    """Bytes by path of the module that owns or made them ("" for none)."""


NOTHING = Moment(0, OTHER, 0, {}, {})


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


def walk(ledger: Ledger, space: str = DEVICE) -> Iterator[Moment]:
    """What is held after every event; the same two dicts each time, updated, with zeros in them."""
    held = dict.fromkeys(CATEGORIES, 0)
    modules: dict[str, int] = {}
    total = 0
    for event, phase, record, change in _events(ledger, space):
        total += change
        held[category_of(record, ledger)] += change
        modules[record.module] = modules.get(record.module, 0) + change
        yield Moment(event, phase, total, held, modules)


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


def peaks(ledger: Ledger, space: str = DEVICE) -> tuple[dict[str, Moment], list[Moment], _Maxima]:
    """The peak of each phase that has one, and the timeline with a point for each of them."""
    maxima = _Maxima(ledger, space)
    wanted = {maxima.event[phase]: phase for phase in PHASES if maxima.bytes[phase]}
    every = max(1, maxima.count // TIMELINE_POINTS)
    found: dict[str, Moment] = {}
    timeline = []
    for number, now in enumerate(walk(ledger, space)):
        if now.event not in wanted and number % every:
            continue
        now = now._replace(categories=_filled(now.categories), modules=_filled(now.modules))
        timeline.append(now)
        if now.event in wanted:
            found[wanted[now.event]] = now
    return found, timeline, maxima


def held_now(ledger: Ledger) -> dict[str, int]:
    """Bytes by category of what is live."""
    held = dict.fromkeys(CATEGORIES, 0)
    for _, _, record, change in _events(ledger, DEVICE):
        held[category_of(record, ledger)] += change
    return _filled(held)


def _filled(held: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in held.items() if size}
