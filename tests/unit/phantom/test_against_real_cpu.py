"""The meter over fake CPU tensors, held against what a real CPU run allocates."""

from __future__ import annotations

import pytest
import torch
from measured import real_peak_bytes
from phantom_models import LM, Step

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


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_a_real_run(name: str) -> None:
    step = CASES[name]
    with PhantomCPU() as cpu:
        step.run(LM(), CPU)
    predicted = cpu.report().peak_allocated_bytes
    assert predicted == pytest.approx(real_peak_bytes(lambda: step.run(LM(), CPU)), rel=0.005)
