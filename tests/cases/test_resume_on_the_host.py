"""What is read for resuming is read to the host first, never straight to a card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from workbench import Workbench

from memtrain.config import Config
from memtrain.device import allocator_statistics, reset_peaks
from memtrain.engine import build
from memtrain.engine.checkpoint import Checkpoints
from memtrain.engine.loop import Progress
from memtrain.engine.resume import capture, restore
from memtrain.engine.step import TrainStep
from memtrain.run_folder import newest


class Nowhere:
    """Data without a position."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def save(step: TrainStep, folder: Path) -> None:
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(capture(step, step.model, Nowhere(), Progress(steps=1), None, "seed: 0\n"))
    checkpoints.wait()


def saved(bench: Workbench, config: Config, folder: Path) -> Path:
    step = bench.step(config)
    step(bench.window(bench.samples(), 8))
    save(step, folder)
    checkpoint = newest(folder)
    assert checkpoint
    return checkpoint


def test_torch_load_maps_to_the_cpu(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(bench, tiny(), tmp_path)
    load, seen = torch.load, []

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", spy)
    step = bench.step(tiny())
    restore(checkpoint, step, step.model, Nowhere())
    assert seen == [{"map_location": "cpu", "weights_only": True}]


@pytest.mark.gpu
def test_a_resumed_run_needs_no_more_than_it_did(
    config: Callable[..., Config], bench: Workbench, tmp_path: Path
) -> None:
    cuda = torch.device("cuda")
    chosen = config("debug=tiny", "device=cuda", "model.dim=512", "model.n_heads=8")
    build.prepare_torch(chosen)
    window = bench.window(bench.samples(), 8)

    def peak_bytes(resume: Path | None) -> int:
        reset_peaks(cuda)
        model = build.build_model(chosen, build.build_dimensions(chosen, 64), cuda)
        step = build.build_step(chosen, model, cuda)
        if resume:
            restore(resume, step, step.model, Nowhere())
        for _ in range(2):
            step(window)
        if not resume:
            save(step, tmp_path)
        return int(allocator_statistics(cuda)["peak_allocated_bytes"])

    fresh = peak_bytes(None)
    assert peak_bytes(newest(tmp_path)) <= 1.05 * fresh
