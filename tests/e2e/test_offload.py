"""Files of the _nvme modes: a folder of the run's own, gone when it ends, named when it could not be removed."""

import os
import signal
from pathlib import Path

import pytest
from command import Finished, Run, Start

TINY = ["debug=tiny", "device=cpu", "offload=optimizer_nvme", "steps=3"]


def one_error_line(finished: Finished) -> str:
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    lines = finished.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize("mode", ["optimizer_nvme", "all_nvme"])
def test_a_run_leaves_nothing_behind(run: Run, tmp_path: Path, mode: str) -> None:
    finished = run(*TINY, f"offload={mode}", f"offload.nvme_dir={tmp_path}")
    assert finished.returncode == 0, finished.stderr
    assert "left behind" not in finished.stdout + finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_planned_run_leaves_nothing_either(run: Run, tmp_path: Path) -> None:
    finished = run(*TINY, f"offload.nvme_dir={tmp_path}", "plan=on")
    assert finished.returncode == 0, finished.stderr
    assert "could not be planned" not in finished.stdout + finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    line = one_error_line(run(*TINY, f"offload.nvme_dir={tmp_path}/absent"))
    assert f"offload.nvme_dir={tmp_path}/absent: no such folder" in line


def test_a_file_is_no_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = one_error_line(run(*TINY, f"offload.nvme_dir={tmp_path}/file"))
    assert f"offload.nvme_dir={tmp_path}/file: not a folder" in line


def test_no_folder_at_all(run: Run) -> None:
    line = one_error_line(run(*TINY))
    assert "offload=optimizer_nvme" in line
    assert "offload.nvme_dir=" in line


def test_a_folder_that_cannot_be_written_to(run: Run) -> None:
    """/proc is read-only for everybody, root included."""
    line = one_error_line(run(*TINY, "offload.nvme_dir=/proc"))
    assert "offload.nvme_dir=/proc: cannot be written to" in line


def test_a_killed_run_is_named_by_the_next(start: Start, run: Run, tmp_path: Path) -> None:
    place = f"offload.nvme_dir={tmp_path}"
    started = start(*TINY, "name=killed", place, "steps=100000")
    started.wait_for_line("switches")
    while not [path for path in tmp_path.rglob("*") if "master" in path.name]:
        assert started.process.poll() is None
    os.killpg(started.process.pid, signal.SIGKILL)
    assert started.finish().returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    finished = run(*TINY, place)
    assert finished.returncode == 0, finished.stderr
    output = " ".join((finished.stdout + finished.stderr).split())
    assert left.name in output
    assert "left behind by a run that ended before it could remove them" in output
    assert list(tmp_path.iterdir()) == [left]  # naming is not removing


def test_an_interrupted_run_removes_its_files(start: Start, tmp_path: Path) -> None:
    started = start(*TINY, f"offload.nvme_dir={tmp_path}", "steps=100000")
    started.wait_for_line("switches")
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.finish().returncode == 130
    assert list(tmp_path.iterdir()) == []
