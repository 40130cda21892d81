"""The meter over fake CPU tensors, held against what a real CPU run allocates."""

from __future__ import annotations

import gc

import pytest
import torch
from phantom_models import LM, Step
from torch.profiler import ProfilerActivity, profile

from memtrain.phantom import PhantomCPU

CASES = {
    "fp32": Step(options={"foreach": True}),
    "fp32 fused": Step(options={"fused": True}),
    "fp32 for loop": Step(options={"foreach": False}),
    "bf16 autocast": Step(dtype=torch.bfloat16, options={"foreach": True}),
    "checkpoint": Step(recompute="non-reentrant", options={"foreach": True}),
    "checkpoint, reentrant": Step(recompute="reentrant", options={"foreach": True}),
    "bf16, checkpoint, accumulation": Step(
        dtype=torch.bfloat16, recompute="non-reentrant", options={"fused": True}, accum=2
    ),
    "sgd": Step(optimizer=torch.optim.SGD, options={"momentum": 0.9, "foreach": True}),
    "sgd without momentum": Step(optimizer=torch.optim.SGD),
}
CPU = torch.device("cpu")


def real_peak_bytes(step: Step) -> int:
    """Largest sum of the profiler's allocation events over model, optimizer and two steps."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = LM()
        step.run(model, CPU)
        del model
    total = peak = 0
    for event in _memory_events(recorded):
        total += event
        peak = max(peak, total)
    return peak


def _memory_events(recorded: profile) -> list[int]:
    events = recorded.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda e: e.start_ns())
    return [e.nbytes() for e in memory]


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_a_real_run(name: str) -> None:
    step = CASES[name]
    with PhantomCPU() as cpu:
        step.run(LM(), CPU)
    predicted, measured = cpu.report().peak_allocated_bytes, real_peak_bytes(step)
    assert predicted == pytest.approx(measured, rel=0.005)
