"""Job after job in one process: no model of an earlier one stays, not even of one that failed in its forward pass."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from memtrain.config import Config
from memtrain.engine import build
from memtrain.tasks import run
from memtrain.tasks.registry import TASKS
from memtrain.tasks.run import Place, run_task


def test_no_model_outlives_its_job(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, models = build.build_model, []

    def watched(*arguments: Any) -> Any:
        model = make(*arguments)
        models.extend(weakref.ref(parameter) for parameter in model.parameters())
        if len(models) == 2 * len(list(model.parameters())):  # the second job
            model.register_forward_pre_hook(fail)
        return model

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(build, "build_model", watched)
    monkeypatch.setattr(run.log, "disabled", True)  # pytest keeps what is logged, and its traceback
    codes = []
    for job in range(4):
        config = tiny("steps=2", "plan=off", "schedule.warmup=0", f"seed={job}")
        try:
            run_task(asdict(config), Place(tmp_path / str(job), tmp_path), TASKS)
            codes.append(0)
        except SystemExit as end:
            codes.append(end.code)
        gc.collect()
        assert [reference for reference in models if reference() is not None] == []
    assert codes == [0, 3, 0, 0]
