"""The logged loss does not depend on accumulation: in the console, in TensorBoard, in metrics and summary."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from memtrain.config import Config
from memtrain.model.transformer import Transformer
from memtrain.tasks.registry import TASKS
from memtrain.tasks.run import Place, run_task


@pytest.mark.parametrize("accum", [1, 2, 4, 8])
def test_a_zero_head_logs_the_logarithm_of_the_vocabulary(
    accum: int,
    tiny: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    initialise = Transformer.initialise

    def with_zero_head(model: Transformer, name: str, parameter: nn.Parameter) -> None:
        initialise(model, name, parameter)
        if name == "head.weight":
            nn.init.zeros_(parameter)

    monkeypatch.setattr(Transformer, "initialise", with_zero_head)
    config = tiny(f"accum={accum}", "steps=2", "model.tied=false", "plan=off")
    run_task(asdict(config), Place(tmp_path, tmp_path), TASKS)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["first_loss"] == pytest.approx(4.158883, abs=1e-5)
    assert math.log(64) == pytest.approx(4.158883, abs=1e-6)
    metrics = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(metrics[0])["loss"] == pytest.approx(4.158883, abs=1e-5)
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert curve[0].value == pytest.approx(4.158883, abs=1e-5)
    shown = re.search(r"step 1/2 · loss (\S+)", capsys.readouterr().out)
    assert shown and shown[1] == "4.159"
