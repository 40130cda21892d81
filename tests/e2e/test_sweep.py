"""A sweep: every job by itself, one table at the end, and nothing that failed is hidden."""

import csv
import json
from pathlib import Path

import pytest
from command import ROOT, Finished, Run, Start


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_summaries(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("*/summary.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def process_ids(folder: Path) -> list[int]:
    """Of the processes that wrote the event files: `events.out.tfevents.<time>.<host>.<pid>.<n>`."""
    return [int(path.name.split(".")[-2]) for path in folder.glob("*/events.out.tfevents.*")]


@pytest.fixture(scope="module")
def half_refused(run: Run) -> Finished:
    """Width 32: 3 and 5 heads are refused."""
    return run("-m", "model.n_heads=2,3,4,5", "model.dim=32", "debug=tiny", "steps=2")


def test_refused_jobs_are_rows_and_the_others_finish(half_refused: Finished) -> None:
    assert half_refused.returncode == 1
    assert "Traceback" not in half_refused.stdout + half_refused.stderr
    rows = read_rows(half_refused.folder)
    assert [row["status"] for row in rows] == ["ok", "refused", "ok", "refused"]
    assert [row["strategy"] for row in rows] == [f"model.n_heads={n}" for n in (2, 3, 4, 5)]
    assert [bool(row["final_loss"]) for row in rows] == [True, False, True, False]
    assert "model.n_heads=5" in rows[3]["error"]
    table = (half_refused.folder / "sweep.md").read_text(encoding="utf-8").splitlines()
    assert len(table) == 2 + 4
    assert (half_refused.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_refused_job_says_why_at_once_and_in_its_folder(half_refused: Finished) -> None:
    errors = [line for line in half_refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "model.n_heads=3" in errors[0] and "model.n_heads=5" in errors[1]
    for job, n_heads in ((1, 3), (3, 5)):
        log = (half_refused.folder / str(job) / "train.log").read_text(encoding="utf-8")
        assert f"not divisible by model.n_heads={n_heads}" in log
        summary = read_summaries(half_refused.folder)[job]
        assert (summary["status"], summary["exit_code"]) == ("refused", 2)


def test_a_step_is_shown_once_a_job(half_refused: Finished) -> None:
    lines = half_refused.stdout.splitlines()
    assert len([line for line in lines if line.startswith("step 1/2 ")]) == 2


def test_each_job_is_a_process_of_its_own(half_refused: Finished) -> None:
    assert len(process_ids(half_refused.folder)) == 2
    assert len(set(process_ids(half_refused.folder))) == 2


def test_a_group_is_swept_without_the_flag(run: Run) -> None:
    """Both optimizers have a momentum, so it can be set for both."""
    swept = ["hydra.mode=MULTIRUN", "optimizer=adamw,sgd", "optimizer.momentum=0.5"]
    finished = run(*swept, "debug=tiny", "steps=2")
    assert finished.returncode == 0, finished.stderr
    rows = read_rows(finished.folder)
    assert [row["strategy"] for row in rows] == ["optimizer=adamw", "optimizer=sgd"]
    assert len({row["final_loss"] for row in rows}) == 2
    assert [summary["job"] for summary in read_summaries(finished.folder)] == [0, 1]


@pytest.mark.slow
def test_a_job_of_a_sweep_is_the_run_by_itself(run: Run) -> None:
    """Nothing is carried from job to job: the second job of two has the losses and the memory of the only one."""
    swept = run("-m", "micro_batch=4,1", "debug=tiny")
    alone = run("-m", "micro_batch=1", "debug=tiny")
    of_two, only = read_summaries(swept.folder)[1], read_summaries(alone.folder)[0]
    assert of_two["final_loss"] == only["final_loss"]
    assert of_two["host_peak_rss_bytes"] == pytest.approx(only["host_peak_rss_bytes"], rel=0.05)


@pytest.mark.slow
def test_all_experiments_run_as_one_sweep(run: Run) -> None:
    finished = run("-m", "experiment=glob(*)", "debug=tiny", timeout=300)
    assert finished.returncode == 0, finished.stderr
    rows = read_rows(finished.folder)
    names = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
    assert len(names) == 6
    assert [row["strategy"] for row in rows] == names
    assert {row["status"] for row in rows} == {"ok"}


def test_a_reused_sweep_folder_hides_no_failure(start: Start, tmp_path: Path) -> None:
    """A folder that holds a run is refused by its job; the row says so, whatever the old summary says."""
    codes = []
    for _ in range(2):
        finished = start(
            "-m", "debug=tiny", "steps=2", "seed=0", folder=tmp_path / "sweep"
        ).finish()
        codes.append(finished.returncode)
    assert codes == [0, 1]
    (row,) = csv.DictReader((tmp_path / "sweep/sweep.csv").open(encoding="utf-8"))
    assert row["status"] == "failed"
    assert "holds a run already" in (tmp_path / "sweep/0/stderr.log").read_text(encoding="utf-8")
