"""What is read for resuming is read to the host first, never straight to a card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine.checkpoint import Checkpoints
from memtrain.engine.loop import Progress
from memtrain.engine.resume import capture, restore
from memtrain.run_folder import newest


class Nowhere:
    """Data without a position."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def saved(bench: Workbench, config: Config, folder: Path) -> Path:
    step = bench.step(config)
    step(bench.window(bench.samples(), 8))
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(capture(step, step.model, Nowhere(), Progress(steps=1), None, "seed: 0\n"))
    checkpoints.wait()
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
