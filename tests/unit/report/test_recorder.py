"""What follows from the records of a run."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from memtrain.report.recorder import Recorder


def record(step: int, peak_allocated_bytes: int, tokens_per_second: float = 100.0) -> dict:
    return {"step": step, "loss": 1.0, "skipped_steps": 0, "host_peak_rss_bytes": 1, "interval_s": 1.0,
            "tokens_per_second": tokens_per_second, "peak_allocated_bytes": peak_allocated_bytes}  # fmt: skip


def curve(folder: Path, tag: str) -> list[float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [point.value for point in events.Scalars(tag)]


def test_the_predicted_peak_stands_beside_the_measured_one(tmp_path: Path) -> None:
    with Recorder(tmp_path, lambda record: None, 0, 0, predicted_peak_bytes=2**30) as recorder:
        for step, peak_bytes in enumerate((2**29, 2**30 + 2**28, 2**29), start=1):
            recorder(record(step, peak_bytes))
    assert recorder.summary["prediction_error_pct"] == pytest.approx(-20)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prediction_error_pct"] for line in lines] == pytest.approx(
        [100, -20, -20]
    )
    assert curve(tmp_path, "memory/predicted_peak_allocated_gib") == [1, 1, 1]
    assert curve(tmp_path, "memory/prediction_error_pct") == pytest.approx([100, -20, -20])


def test_without_a_measured_peak_there_is_no_error(tmp_path: Path) -> None:
    on_cpu = record(1, 0)
    del on_cpu["peak_allocated_bytes"]
    with Recorder(tmp_path, lambda record: None, 0, 0, predicted_peak_bytes=2**30) as recorder:
        recorder(on_cpu)
    assert "prediction_error_pct" not in recorder.summary


def test_the_speed_of_the_run_leaves_the_first_step_out(tmp_path: Path) -> None:
    with Recorder(tmp_path, lambda record: None, 0, 0) as recorder:
        for step, rate in enumerate((1.0, 100.0, 300.0), start=1):
            recorder(record(step, 1, rate))
    assert recorder.summary["tokens_per_second"] == 200
    assert curve(tmp_path, "speed/tokens_per_second_run") == [1, 100, 200]
