"""Ctrl-C and SIGTERM end a run, or a whole sweep, in time, with what was reached saved and no process left behind."""

import json
import os
import signal
from pathlib import Path

import pytest
from command import Start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from memtrain.run_folder import newest, step_of

STOP_WITHIN_S = 10


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def read_metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_cleanly(number: signal.Signals, code: int, start: Start) -> None:
    started = start("debug=tiny", "steps=1000000")
    started.wait_for_line("step 20/")
    started.process.send_signal(number)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == code
    assert "Traceback" not in finished.stderr
    summary = read_summary(finished.folder)
    assert summary["status"] == "interrupted"
    steps = [record["step"] for record in read_metrics(finished.folder)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 20
    assert [
        point.step
        for point in EventAccumulator(str(finished.folder)).Reload().Scalars("train/loss")
    ] == steps
    last = newest(finished.folder)
    assert last is not None and step_of(last) == len(steps)
    assert_no_process_of(started.process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_whole_sweep(number: signal.Signals, code: int, start: Start) -> None:
    """SIGTERM reaches the parent alone, Ctrl-C all processes of the terminal."""
    started = start("-m", "debug=tiny", "steps=1000000", "seed=0,1,2")
    started.wait_for_line("step 20/")
    send = os.killpg if number == signal.SIGINT else os.kill
    send(started.process.pid, number)
    finished = started.finish(STOP_WITHIN_S)
    assert finished.returncode == code
    assert "Traceback" not in finished.stderr
    assert read_summary(finished.folder / "0")["status"] == "interrupted"
    assert not (finished.folder / "1").exists()
    assert_no_process_of(started.process.pid)


def assert_no_process_of(group: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
