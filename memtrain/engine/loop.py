"""The training loop: windows in, records out."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memtrain.data.loader import Batch
from memtrain.device import (
    allocator_statistics,
    autocast,
    host_memory_bytes,
    host_peak_bytes,
    reset_peaks,
)
from memtrain.engine.schedule import Schedule
from memtrain.engine.step import TrainStep
from memtrain.errors import NotFiniteError
from memtrain.model.loss import LossFunction

Record = dict[str, Any]


@dataclass
class Progress:
    """Where the run stands. Steps are windows; the schedule counts only those that changed something."""

    steps: int = 0
    stepped: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    """Without padding, but for those that a checkpoint without a count of it brings along."""
    padding: int = 0
    last_loss: float | None = None
    """Of the last step that was finite."""
    pending: Record | None = None
    """The record of the last window, if a signal cut off its validation: that is made before the next window."""


@dataclass(frozen=True)
class Pace:
    """How long a run is, and how often things happen. In steps; 0: only at the end, or never."""

    steps: int
    log_every: int
    eval_every: int = 0
    save_every: int = 0
    max_skipped: int = 30
    """Steps in a row that are not finite before the run stops."""


@dataclass(frozen=True)
class Callbacks:
    """Whom the loop calls."""

    observe: Callable[[Record], None]
    """At log steps, and for every step that was skipped."""
    evaluate: Callable[[], float] | None = None
    """The validation loss."""
    save: Callable[[Progress, float | None], None] | None = None
    """With the validation loss, if it was just measured; after `save_every` steps, at the end and when stopping."""
    judge: Callable[[bool], None] = lambda finite: None
    """After every step that had something to learn: whether it was finite."""
    stop: Callable[[], bool] = lambda: False
    """Whether to end after this window."""


def train(
    step: TrainStep,
    windows: Iterable[list[Batch]],
    schedule: Schedule,
    pace: Pace,
    calls: Callbacks,
    progress: Progress | None = None,
) -> Progress:
    """Train until `pace.steps` windows have been, from `progress` on.

    A validation that `stop` interrupts is repeated when the run goes on. Raises NotFiniteError after `max_skipped`
    skipped steps in a row, or if no step at all was finite.
    """
    progress = progress or Progress()
    if calls.evaluate and (record := progress.pending):
        if not validate(record, progress, calls):
            return progress
        calls.observe(record)
    clock = Clock()
    reset_peaks(step.device)
    for window in take(windows, pace.steps - progress.steps):
        learning_rate = set_learning_rate(step, schedule(progress.stepped))
        loss, grad_norm, stepped = step(window).tolist()  # the one wait for the device
        count(progress, window, loss if stepped else None)
        if progress.skipped_in_a_row or stepped:
            calls.judge(bool(stepped))
        clock.add(window)
        record = {"step": progress.steps, "loss": loss, "lr": learning_rate}
        record |= {"grad_norm": grad_norm, "tokens": progress.tokens}
        record["padding_tokens"] = progress.padding
        last = progress.steps == pace.steps
        evaluating = last or is_due(progress.steps, pace.eval_every)
        logging = evaluating or progress.steps == 1 or is_due(progress.steps, pace.log_every)
        if not stepped:
            record["last_loss"] = progress.last_loss
        if logging or not stepped:
            record |= measurements(step, progress) | clock.read(padded=progress.padding > 0)
            if not evaluating or validate(record, progress, calls):
                calls.observe(record)
            reset_peaks(step.device)
            clock.restart()
        stopping = calls.stop()
        saving = pace.save_every and (last or is_due(progress.steps, pace.save_every))
        if calls.save and (stopping or saving):
            calls.save(progress, record.get("val_loss"))
        if stopping:
            return progress
        check_finite(progress, pace.max_skipped)
    check_learned(progress)
    return progress


def validate(record: Record, progress: Progress, calls: Callbacks) -> bool:
    """Add the validation loss to `record`. False: `stop` may have cut it off, and the record is pending."""
    if calls.evaluate is None:
        return True
    val_loss = calls.evaluate()
    progress.pending = record if calls.stop() else None
    if progress.pending is None:
        record["val_loss"] = val_loss
    return progress.pending is None


def check_finite(progress: Progress, max_skipped: int) -> None:
    if progress.skipped_in_a_row >= max_skipped:
        raise NotFiniteError(
            f"step {progress.steps}: loss or gradient not finite {max_skipped} times in a row; "
            "lower optimizer.lr, or use precision=bf16 or fp32"
        )


def check_learned(progress: Progress) -> None:
    if progress.skipped_in_a_row and not progress.stepped:
        raise NotFiniteError(
            f"none of {progress.steps} steps was finite, so nothing was learned; "
            "lower optimizer.lr, or use precision=bf16 or fp32"
        )


def take(windows: Iterable[list[Batch]], steps: int) -> Iterator[list[Batch]]:
    """The first `steps` windows, without asking for one more."""
    return (window for _, window in zip(range(steps), windows, strict=False))


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def set_learning_rate(step: TrainStep, learning_rate: float) -> float:
    for update in step.updates:
        for group in update.param_groups:
            group["lr"] = learning_rate
    return learning_rate


def count(progress: Progress, window: list[Batch], loss: float | None) -> None:
    """`loss` None: the step was skipped."""
    progress.steps += 1
    progress.stepped += loss is not None
    progress.skipped += loss is None
    if loss is not None:
        progress.skipped_in_a_row, progress.last_loss = 0, loss
    elif any(batch.n_targets for batch in window):  # else there was nothing to learn
        progress.skipped_in_a_row += 1
    progress.tokens += sum(batch.n_tokens for batch in window)
    progress.padding += sum(batch.n_padding for batch in window)


def measurements(step: TrainStep, progress: Progress) -> Record:
    """What is asked of device and host at log steps only. The device's peaks are since the last record."""
    record: Record = {"skipped_steps": progress.skipped, **allocator_statistics(step.device)}
    if step.scaler.is_enabled():
        record["loss_scale"] = step.scaler.get_scale()
    record["host_rss_bytes"] = host_memory_bytes()
    record["host_peak_rss_bytes"] = host_peak_bytes()
    return record


class Clock:
    """Tokens per second since the last record, padding, validation and logging left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start_s, self._tokens, self._padding = time.perf_counter(), 0, 0

    def add(self, window: list[Batch]) -> None:
        self._tokens += sum(batch.n_tokens for batch in window)
        self._padding += sum(batch.n_padding for batch in window)

    def read(self, padded: bool) -> Record:
        """`padded`: with the share of padding in what was computed."""
        elapsed_s = time.perf_counter() - self._start_s
        record: Record = {"tokens_per_second": self._tokens / elapsed_s, "interval_s": elapsed_s}
        if padded:
            record["padding_share"] = self._padding / (self._tokens + self._padding)
        return record


@torch.no_grad()
def mean_loss(step: TrainStep, loss_function: LossFunction, batches: Iterable[Batch]) -> float:
    """Loss per target token over `batches`, the model in evaluation mode; NaN without a target."""
    total, one, n_targets = (
        torch.zeros((), device=step.device),
        torch.ones((), device=step.device),
        0,
    )
    step.model.eval()
    for batch in batches:
        n_targets += batch.n_targets
        batch = batch.to(step.device)
        with autocast(step.device, step.compute_dtype):
            hidden = step.model(batch.tokens, batch.starts)
            total += loss_function(hidden, step.model.head.weight, batch.targets, one)
    step.model.train()
    return total.item() / n_targets if n_targets else float("nan")
