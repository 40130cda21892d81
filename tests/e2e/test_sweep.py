"""A sweep: every job by itself, one table at the end, and nothing that failed is hidden."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from command import ROOT, Finished, Run, Start, processes_with


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_summaries(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("*/summary.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def read_metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


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


def test_jobs_of_several_names_share_a_folder_and_a_table(run: Run, tmp_path: Path) -> None:
    finished = run("-m", "debug=tiny", "steps=1", "name=aa,bb", "accum=0", outputs=tmp_path)
    assert finished.returncode == 1
    (folder,) = (tmp_path / "sweeps").glob("*/*")
    assert [row["status"] for row in read_rows(folder)] == ["refused", "refused"]


@pytest.mark.slow
def test_jobs_side_by_side_by_another_launcher(start: Start, tmp_path: Path) -> None:
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    finished = start(
        "-m", *launcher, "debug=tiny", "steps=1", "accum=1,0", outputs=tmp_path
    ).finish()
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    (folder,) = (tmp_path / "sweeps").glob("*/*")
    assert [row["status"] for row in read_rows(folder)] == ["ok", "refused"]


@pytest.mark.slow
def test_a_search_goes_on_after_a_job_that_failed(start: Start, tmp_path: Path) -> None:
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1"]
    finished = start(
        "-m", *search, "hydra.sweeper.sampler.seed=1", "debug=tiny", "steps=1", "accum=choice(0,1)", outputs=tmp_path
    ).finish()  # fmt: skip
    assert finished.returncode == 1
    (folder,) = (tmp_path / "sweeps").glob("*/*")
    assert {row["status"] for row in read_rows(folder)} == {"ok", "refused"}
    assert len(read_rows(folder)) == 4


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
def test_all_experiments_run_as_one_sweep(run: Run) -> None:
    finished = run("-m", "experiment=glob(*)", "debug=tiny", timeout=300)
    assert finished.returncode == 0, finished.stderr
    rows = read_rows(finished.folder)
    names = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
    assert len(names) == 6
    assert [row["strategy"] for row in rows] == names
    assert {row["status"] for row in rows} == {"ok"}


# --- stopped, and gone on with ------------------------------------------------------------------------------------

JOBS = ["-m", "debug=tiny", "seed=0,1,2", "name=seeds", "schedule=constant", "save_every=5"]


def the_sweep(outputs: Path) -> Path:
    (folder,) = (outputs / "sweeps/seeds").iterdir()
    return folder


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_one_signal_ends_a_sweep_and_it_goes_on(
    number: signal.Signals, code: int, start: Start, run: Run, tmp_path: Path
) -> None:
    """What is done is kept, the interrupted job goes on from where it was, the last one begins."""
    started = start(*JOBS, "steps=150", outputs=tmp_path)
    started.wait_for_line("job 1:")
    started.wait_for_line("step 20/")
    os.kill(started.process.pid, number)
    finished = started.finish(20)
    assert finished.returncode == code
    assert "Traceback" not in finished.stdout + finished.stderr
    folder = the_sweep(tmp_path)
    assert [row["status"] for row in read_rows(folder)] == ["ok", "interrupted"]
    assert "2 jobs" in finished.stdout and "sweep.resume=true" in finished.stderr
    for locked in (folder, folder / "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((locked / ".lock").read_text()), 0)
    stopped_at = read_metrics(folder / "1")[-1]["step"]
    first, metrics = read_summaries(folder)[0], (folder / "0/metrics.jsonl").read_bytes()

    resumed = run(*JOBS, "steps=150", "sweep.resume=true", outputs=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert the_sweep(tmp_path) == folder
    assert f"step {stopped_at} of 150" in resumed.stdout
    rows = read_rows(folder)
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["kept"] for row in rows] == ["True", "", ""]
    assert read_summaries(folder)[0] == first | {"kept": True}
    assert (folder / "0/metrics.jsonl").read_bytes() == metrics
    assert [[record["step"] for record in read_metrics(folder / job)] for job in "012"] == [
        list(range(1, 151))
    ] * 3


@pytest.mark.slow
def test_unfinished_jobs_are_run_again(run: Run, tmp_path: Path) -> None:
    """From what they saved, if anything; a job that left nothing to go on with begins anew."""
    jobs = [*JOBS, "steps=7", "keep=2"]
    assert run(*jobs, outputs=tmp_path).returncode == 0
    folder = the_sweep(tmp_path)
    failed = read_summaries(folder)[1] | {"status": "failed", "error": "by hand"}
    (folder / "1/summary.json").write_text(json.dumps(failed))
    shutil.rmtree(folder / "1/checkpoints/step_00000007")
    (folder / "2/summary.json").unlink()
    shutil.rmtree(folder / "2/checkpoints")
    (folder / "2/notes.txt").write_text("by another hand")
    resumed = run(*jobs, "sweep.resume=true", outputs=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("step 5 of 7") == 1
    rows = read_rows(folder)
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["kept"] for row in rows] == ["True", "", ""]
    assert (folder / "2/notes.txt").exists()
    for job in "012":
        assert [record["step"] for record in read_metrics(folder / job)] == [*range(1, 8)]


def test_a_signal_as_a_job_begins_leaves_none(start: Start, tmp_path: Path) -> None:
    for attempt in range(2):
        outputs = tmp_path / str(attempt)
        started = start(*JOBS, "steps=100000", outputs=outputs)
        started.wait_for_line("job 0:")
        time.sleep(0.01 * attempt)
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.finish(10).returncode == 143
        assert not processes_with(str(outputs))


def test_a_signal_between_two_jobs_ends_a_sweep(start: Start, tmp_path: Path) -> None:
    """With the table of those that are done."""
    for attempt in range(2):
        outputs = tmp_path / str(attempt)
        started = start(*JOBS, "steps=1", outputs=outputs)
        started.wait_for_line("run folder")
        while not list(outputs.glob("sweeps/seeds/*/0/summary.json")):
            time.sleep(0.001)
        time.sleep(0.1 * attempt)
        os.kill(started.process.pid, signal.SIGTERM)
        finished = started.finish(20)
        assert finished.returncode == 143
        assert "sweep.resume=true" in finished.stderr
        rows = read_rows(the_sweep(outputs))
        assert rows and rows[0]["status"] == "ok" and len(rows) < 3


def test_a_signal_to_all_processes_asks_a_job_once(start: Start, tmp_path: Path) -> None:
    """As systemd and batch systems send it: the job hears it twice, and saves all the same."""
    started = start(*JOBS, "steps=100000", "save_every=0", outputs=tmp_path)
    started.wait_for_line("step 20/")
    folder = the_sweep(tmp_path)
    job = int((folder / "0/.lock").read_text())
    for process in (job, started.process.pid):
        os.kill(process, signal.SIGTERM)
    assert started.finish(10).returncode == 143
    (row,) = read_rows(folder)
    assert row["status"] == "interrupted" and "saved at step" in row["error"]
    assert list((folder / "0/checkpoints").glob("step_*"))


def test_a_job_that_outlived_its_sweep_is_not_run_twice(
    start: Start, run: Run, tmp_path: Path
) -> None:
    started = start(*JOBS, "steps=100000", outputs=tmp_path)
    started.wait_for_line("step 20/")
    folder = the_sweep(tmp_path)
    job = int((folder / "0/.lock").read_text())
    os.kill(started.process.pid, signal.SIGKILL)
    refused = run(*JOBS, "steps=100000", "sweep.resume=true", outputs=tmp_path)
    os.kill(job, signal.SIGTERM)
    started.finish()
    while processes_with(str(folder)):
        time.sleep(0.05)
    assert read_summaries(folder)[0]["status"] == "interrupted"
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(
        f"error: {folder}/0: process {job} is writing"
    )
    assert "Traceback" not in refused.stderr


def test_a_job_goes_on_with_its_own_overrides(run: Run, tmp_path: Path) -> None:
    """They may come from a config file, which somebody edits."""
    (tmp_path / "experiment").mkdir()
    mine = tmp_path / "experiment/mine.yaml"
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optimizer.lr: {}\n"
    sweep = [
        f"--config-dir={tmp_path}",
        "-m",
        "experiment=mine",
        *JOBS[1:2],
        "name=seeds",
        "steps=2",
    ]
    mine.write_text(text.format("1e-3,2e-3"))
    assert run(*sweep, outputs=tmp_path).returncode == 0
    mine.write_text(text.format("5e-1,2e-3"))
    refused = run(*sweep, "sweep.resume=true", outputs=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "was begun with" in line and "optimizer.lr=0.001 " in line
    assert len(read_summaries(the_sweep(tmp_path))) == 2


def test_a_sweep_that_cannot_be_written_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run(*JOBS, "steps=1", folder=tmp_path / "file/sweep")
    assert refused.returncode in (1, 2)
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "file") in line


def test_only_a_sweep_of_the_same_overrides_goes_on(run: Run, tmp_path: Path) -> None:
    assert run(*JOBS[:2], "seed=0", "name=seeds", "steps=1", outputs=tmp_path).returncode == 0
    before = sorted(path for path in tmp_path.rglob("*"))
    for other in (["seed=0", "steps=2"], ["seed=1", "steps=1"]):
        refused = run(*JOBS[:2], *other, "name=seeds", "sweep.resume=true", outputs=tmp_path)
        assert refused.returncode == 2
        (line,) = refused.stderr.splitlines()
        assert line.startswith("error: sweep.resume=true: no sweep of the same overrides in ")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_two_processes_do_not_write_one_sweep(start: Start, run: Run, tmp_path: Path) -> None:
    endless = [*JOBS, "steps=1000000"]
    started = start(*endless, outputs=tmp_path)
    started.wait_for_line("step 1/")
    refused = run(*endless, "sweep.resume=true", outputs=tmp_path)
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.finish(20).returncode == 143
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"process {started.process.pid} is writing" in line


def test_a_single_run_is_no_sweep(run: Run, tmp_path: Path) -> None:
    finished = run("debug=tiny", "steps=1", "sweep.resume=true", outputs=tmp_path)
    assert finished.returncode == 0
    assert "warning: sweep.resume=true has no effect without -m" in finished.stderr
