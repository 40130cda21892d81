"""fp16 is what is computed in: what is trained stays fp32, so the scaler takes it."""

from collections.abc import Callable

import torch
from workbench import Workbench

from memtrain.config import Config


def test_weights_and_gradients_are_fp32(tiny: Callable[..., Config], bench: Workbench) -> None:
    step = bench.step(tiny("precision=fp16", "precision.loss_scale=1024"))
    window = bench.window(bench.samples(), 4)
    gradients = bench.gradients(step, window)
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def test_two_steps_are_taken(tiny: Callable[..., Config], bench: Workbench) -> None:
    step = bench.step(tiny("precision=fp16", "precision.loss_scale=1024"))
    window = bench.window(bench.samples(), 4)
    assert [step(window)[2].item() for _ in range(2)] == [1.0, 1.0]
