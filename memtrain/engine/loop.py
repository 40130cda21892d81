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


def train(
    step: TrainStep,
    windows: Iterable[list[Batch]],
    schedule: Schedule,
    steps: int,
    *,
    progress: Progress | None = None,
    save: Callable[[Progress, float | None], None] | None = None,
    save_every: int = 0,
    judge: Callable[[bool], None] = lambda finite: None,
    stop: Callable[[], bool] = lambda: False,
    evaluate: Callable[[], float] | None,
    observe: Callable[[Record], None],
    log_every: int,
    eval_every: int,
    max_skipped: int,
) -> Progress:
    """Train until `steps` windows have been, from `progress` on. Raises NotFiniteError after `max_skipped` skipped
    steps in a row, or if no step at all was finite.

    `save` (progress, validation loss if it was just measured) is called every `save_every` windows, after the last and
    after the one in which `stop` became true; `judge` after every step, with whether it was finite. A validation that
    `stop` fell into is made again by who goes on.
    """
    progress = progress or Progress()
    if evaluate and (record := progress.pending):
        if not validate(record, progress, evaluate, stop):
            return progress
        observe(record)
    clock = Clock()
    reset_peaks(step.device)
    for window in take(windows, steps - progress.steps):
        learning_rate = set_learning_rate(step, schedule(progress.stepped))
        loss, grad_norm, stepped = step(window).tolist()  # the one wait for the device
        count(progress, window, loss if stepped else None)
        if progress.skipped_in_a_row or stepped:
            judge(bool(stepped))
        clock.add(window)
        record = {"step": progress.steps, "loss": loss, "lr": learning_rate}
        record |= {"grad_norm": grad_norm, "tokens": progress.tokens}
        record["padding_tokens"] = progress.padding
        last = progress.steps == steps
        evaluating = last or is_due(progress.steps, eval_every)
        logging = evaluating or progress.steps == 1 or is_due(progress.steps, log_every)
        if not stepped:
            record["last_loss"] = progress.last_loss
        if logging or not stepped:
            record |= measurements(step, progress) | clock.read(padded=progress.padding > 0)
            if not (evaluate and evaluating) or validate(record, progress, evaluate, stop):
                observe(record)
            reset_peaks(step.device)
            clock.restart()
        stopping = stop()
        if save and (stopping or (save_every and (last or is_due(progress.steps, save_every)))):
            save(progress, record.get("val_loss"))
        if stopping:
            return progress
        if progress.skipped_in_a_row >= max_skipped:
            raise NotFiniteError(
                f"step {progress.steps}: loss or gradient not finite {max_skipped} times in a row; "
                "lower optimizer.lr, or use precision=bf16 or fp32"
            )
    if progress.skipped_in_a_row and not progress.stepped:
        raise NotFiniteError(
            f"none of {progress.steps} steps was finite, so nothing was learned; "
            "lower optimizer.lr, or use precision=bf16 or fp32"
        )
    return progress


def validate(
    record: Record, progress: Progress, evaluate: Callable[[], float], stop: Callable[[], bool]
) -> bool:
    """Add the validation loss to `record`. False: `stop` may have cut it off, and the record is pending."""
    val_loss = evaluate()
    progress.pending = record if stop() else None
    if progress.pending is None:
        record["val_loss"] = val_loss
    return progress.pending is None


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
