"""fp16 on the CPU is fp16: a scaler that is on, products in fp16, and a line that says so."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from workbench import Workbench

from memtrain.config import Config
from memtrain.tasks.registry import TASKS
from memtrain.tasks.run import Place, run_task


def test_the_scaler_is_on_and_products_are_fp16(
    tiny: Callable[..., Config], bench: Workbench
) -> None:
    step = bench.step(tiny("precision=fp16"))
    seen: list[torch.dtype] = []
    up = step.model.blocks[0].mlp.up
    up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step.accumulate(bench.window(bench.samples(), 8))
    assert step.scaler.is_enabled()
    assert seen == [torch.float16]


def test_the_run_says_what_it_computes_in(
    tiny: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(
        "precision=fp16", "steps=1", "plan=off", "schedule.warmup=0", "precision.loss_scale=256"
    )
    run_task(asdict(config), Place(tmp_path, tmp_path), TASKS)
    shown = " ".join(capsys.readouterr().out.split())
    assert "precision=fp16" in shown
    assert "fp16 is what is computed in: weights, gradients and moments stay fp32" in shown
