"""What a run will take: `engine.step` itself, executed on a GPU that is not there."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memtrain.cards import Card
from memtrain.config import Config
from memtrain.data.loader import Batch
from memtrain.engine import build
from memtrain.engine.step import TrainStep
from memtrain.engine.update import parameters_of
from memtrain.memory import file_store
from memtrain.memory.host_optimizer import HostOptimizer
from memtrain.model.transformer import Dimensions, count_parameters
from memtrain.phantom import CATEGORIES, PhantomCPU, PhantomGPU, Report
from memtrain.phantom.allocator import allocator_settings
from memtrain.phantom.ledger import pinned_block_bytes
from memtrain.planner.speed import estimate_speed

N_STEPS = 3
"""The first step has no optimizer state, the second meets an allocator that has; from the third on all are alike."""
MOST_ACCUM = 3
"""Micro-batches of a window that are run: the first, one between, the last. More of those between change no peak."""
SCALAR_BYTES = 512
"""What the loss of a micro-batch takes until the window ends: the CUDA allocator's smallest block."""


@dataclass(frozen=True)
class Prediction:
    report: Report
    parameters: int
    files_bytes: int
    """On the disk, for the _nvme modes of offload."""
    plan_seconds: float


def predict(config: Config, dimensions: Dimensions, card: Card) -> Prediction:
    """The run's own step on `card`; one that does not fit goes on, and its report says so."""
    gpu = PhantomGPU(card, expandable_segments=expandable_segments(), enforce_capacity=False)
    return run_steps(config, dimensions, gpu)


def expandable_segments() -> bool:
    """Whether the allocator of a run started like this one would grow its segments (torch's own setting)."""
    return "expandable_segments:true" in allocator_settings().lower()


def predict_cpu(config: Config, dimensions: Dimensions) -> Prediction:
    """The same step over fake CPU tensors, by the CPU's own kernels: to hold against a real run."""
    return run_steps(config, dimensions, PhantomCPU())


def make_plan(config: Config, dimensions: Dimensions, card: Card) -> dict[str, Any]:
    """The prediction as the plain record that plan.json holds; sizes in bytes, times in seconds."""
    prediction = predict(config, dimensions, card)
    report = prediction.report
    speed = estimate_speed(report, card, config.precision.tf32, config.accum)
    tokens = config.micro_batch * config.accum * config.seq_len
    return {
        "gpu": card.name,
        "fits": report.fits,
        "capacity_bytes": report.capacity_bytes,
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "peak_active_bytes": report.peak_active_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "device_total_bytes": report.peak_reserved_bytes + card.context_bytes,
        "device_memory_bytes": card.memory_bytes,
        "peak_phase": report.peak_phase,
        "categories": report.categories,
        "phases": {
            name: {"allocated_bytes": peak.allocated_bytes, "categories": peak.categories}
            for name, peak in report.phases.items()
        },
        "modules_at_peak": report.modules_at_peak,
        "host_bytes": report.host_peak_bytes,
        "host_pinned_bytes": report.host_pinned_peak_bytes,
        "h2d_bytes_per_step": report.h2d_bytes,
        "d2h_bytes_per_step": report.d2h_bytes,
        "nvme_bytes": prediction.files_bytes,
        "nvme_read_bytes_per_step": report.nvme_read_bytes,
        "nvme_written_bytes_per_step": report.nvme_written_bytes,
        "flops_per_step": sum(report.flops.values()),
        "step_seconds": speed.step_seconds,
        "step_seconds_by_limit": speed.parts,
        "limited_by": speed.limited_by,
        "tokens_per_second": tokens / speed.step_seconds,
        "counts_padding": config.data.source == "jsonl",
        "parameters": prediction.parameters,
        "timeline": timeline(report),
        "plan_seconds": prediction.plan_seconds,
    }


def timeline(report: Report) -> dict[str, Any]:
    """Bytes by category over the run's events, for a plot."""
    held = [
        name for name in CATEGORIES if any(point.categories.get(name) for point in report.timeline)
    ]
    return {
        "categories": held,
        "bytes": [[point.categories.get(name, 0) for name in held] for point in report.timeline],
        "phase": [point.phase for point in report.timeline],
    }


def run_steps(
    config: Config, dimensions: Dimensions, phantom: PhantomGPU | PhantomCPU
) -> Prediction:
    start_s = time.perf_counter()
    n_between = max(0, config.accum - MOST_ACCUM)
    with phantom:
        step, windows = make_step(config, dimensions, phantom.device)
        for number in range(N_STEPS):
            phantom.step_boundary()
            last = number == N_STEPS - 1
            if last and n_between:
                shorter = phantom.report()
            step(windows(config.accum - n_between - (n_between > 0 and not last)))
            phantom.label(state_on_device(step), "optimizer_state")
        parameters = count_parameters(step.model)
        files_bytes = file_store.files_bytes(Path(config.offload.nvme_dir or ""))
    report = phantom.report()
    if n_between:
        report = lengthened(report, shorter, n_between, batch_bytes(config))
    return Prediction(report, parameters, files_bytes, time.perf_counter() - start_s)


def state_on_device(step: TrainStep) -> Iterator[torch.Tensor]:
    """What optimizers keep there, for the report: some of it is in no torch optimizer."""
    for update in step.updates:
        for parameter in [] if isinstance(update, HostOptimizer) else parameters_of(update):
            values = update.state(parameter).values()
            yield from (v for v in values if isinstance(v, torch.Tensor))


def n_arrays(config: Config) -> int:
    """Of a batch: tokens, targets and, where documents are kept apart, where they begin."""
    return 3 if config.data.document_mask else 2


def batch_bytes(config: Config) -> int:
    return n_arrays(config) * pinned_block_bytes(
        config.micro_batch * config.seq_len * torch.int64.itemsize
    )


def lengthened(report: Report, shorter: Report, n_more: int, batch_bytes: int) -> Report:
    """The report of a window with `n_more` micro-batches, each adding what separates `report` from `shorter`.

    The window's batches wait on the host.
    """
    before = {op.key: op for op in shorter.ops}
    none = dict.fromkeys(("calls", "flops", "moved_bytes"), 0)
    ops = []
    for op in report.ops:
        old = before.get(op.key, replace(op, **none))  # type: ignore[arg-type]
        by_one = {name: getattr(op, name) - getattr(old, name) for name in none}
        more = {name: getattr(op, name) + n_more * grown for name, grown in by_one.items()}
        ops.append(replace(op, **more))
    scalars_bytes = n_more * SCALAR_BYTES
    return replace(
        report,
        ops=ops,
        peak_allocated_bytes=report.peak_allocated_bytes + scalars_bytes,
        peak_active_bytes=report.peak_active_bytes + scalars_bytes,
        host_peak_bytes=report.host_peak_bytes + n_more * batch_bytes,
        host_pinned_peak_bytes=report.host_pinned_peak_bytes + n_more * batch_bytes,
    )


def make_step(
    config: Config, dimensions: Dimensions, device: torch.device
) -> tuple[TrainStep, Callable[..., list[Batch]]]:
    model = build.build_model(replace(config, compile="off"), dimensions, device, reads=False)
    step = build.build_step(config, model, device)
    shape, pinned = (config.micro_batch, config.seq_len), device.type != "cpu"

    def window(accum: int = config.accum) -> list[Batch]:
        return [batch() for _ in range(accum)]

    def batch() -> Batch:
        arrays = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
            for _ in range(n_arrays(config))
        ]
        starts = arrays[2] if len(arrays) > 2 else None
        return Batch(arrays[0], arrays[1], arrays[0].numel(), starts)

    return step, window
