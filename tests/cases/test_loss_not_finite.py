"""A loss that is NaN is shown as that, nothing finite in its place, and what is saved then is sound."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from memtrain.config import Config
from memtrain.engine import build
from memtrain.run_folder import complete
from memtrain.tasks.registry import TASKS
from memtrain.tasks.run import Place, run_task


def test_the_third_of_six_steps_is_not_a_number(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    make = build.build_loss

    def spoiled(*arguments: Any) -> Any:
        loss, calls = make(*arguments), itertools.count(1)
        return lambda *tensors: loss(*tensors) * (math.nan if next(calls) == 3 else 1.0)

    monkeypatch.setattr(build, "build_loss", spoiled)
    config = tiny(
        "steps=6", "save_every=1", "keep=-1", "plan=off", "data.val_fraction=0", "eval_sequences=1"
    )
    run_task(asdict(config), Place(tmp_path, tmp_path), TASKS)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert [loss is None for loss in losses] == [False, False, True, False, False, False]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3/6")]
    assert len(shown) == 1 and "loss nan" in shown[0]
    found = complete(tmp_path)
    assert len(found) == 6
    for checkpoint in found:
        weights = load_file(checkpoint / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())
    before, after = (load_file(found[i] / "model.safetensors") for i in (1, 2))
    assert all(before[name].equal(after[name]) for name in before)
