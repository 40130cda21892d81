"""After a resume each step is there once: what was written of later steps before the crash is taken out."""

import json
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from memtrain.report.recorder import Recorder


def write(folder: Path, first: int, last: int, resumed_step: int = 0) -> None:
    with Recorder(folder, lambda record: None, 0.0, 0, resumed_step) as recorder:
        for step in range(first, last + 1):
            recorder({"step": step, "loss": 1.0 * step, "lr": 1e-3, "grad_norm": 1.0, "tokens": step,
                      "skipped_steps": 0, "host_rss_bytes": 1, "host_peak_rss_bytes": 1,
                      "tokens_per_second": 1.0, "interval_s": 1.0})  # fmt: skip


def test_a_hundred_and_twenty_points(tmp_path: Path) -> None:
    write(tmp_path, 1, 150)
    time.sleep(1.1)  # event files are read in the order of the seconds in their names
    write(tmp_path, 101, 120, resumed_step=100)
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 121))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 121))
