"""A folder is written only by whose it is: what another run, sweep or person put there stays as it is."""

import json
from pathlib import Path

import pytest
from command import Finished, Run

from memtrain.owner import check_single_process

TINY = ["debug=tiny", "steps=2", "schedule.warmup=0", "generate.tokens=0"]


def contents(folder: Path) -> dict[Path, bytes]:
    """Without the locks, which say who wrote last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


def the_line(finished: Finished) -> str:
    """Of a refusal, which is all that is said."""
    assert finished.returncode == 2, finished.stderr
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def done(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("done") / "out"
    finished = run(*TINY, "save_every=2", folder=folder)
    assert finished.returncode == 0, finished.stderr
    return folder


SHARING = ["-m", *TINY, "save_every=2", "seed=0,1", "hydra.sweep.subdir=same"]


@pytest.fixture(scope="module")
def sweep(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Of two jobs in one folder: the first is done, the second is refused."""
    return run(*SHARING, folder=tmp_path_factory.mktemp("sweep") / "out")


def test_two_jobs_do_not_share_a_folder(run: Run, sweep: Finished) -> None:
    same = sweep.folder / "same"
    assert sweep.returncode == 2
    assert sweep.stderr.splitlines()[-1].startswith(f"error: hydra.sweep.subdir={same}: holds")
    summary = json.loads((same / "summary.json").read_bytes())
    assert (summary["job"], summary["status"]) == (0, "ok")
    assert len((sweep.folder / "sweep.csv").read_text().splitlines()) == 2
    before = contents(same)
    resumed = run(*SHARING, "sweep.resume=true", folder=sweep.folder)
    assert resumed.returncode == 2 and resumed.stdout.count(": kept") == 1
    assert "was begun with" in resumed.stderr
    assert json.loads((same / "summary.json").read_bytes()) == summary | {"kept": True}
    kept = same / "summary.json"
    assert contents(same) == before | {kept: kept.read_bytes()}


def test_a_finished_run_or_sweep_is_written_by_no_other(
    run: Run, done: Path, sweep: Finished
) -> None:
    before = contents(done) | contents(sweep.folder)
    for folder in (done, sweep.folder, sweep.folder / "same"):
        assert f"hydra.run.dir={folder}: holds" in the_line(run(*TINY, "seed=7", folder=folder))
        line = the_line(run("-m", *TINY, "seed=3,4", folder=folder))
        assert f"hydra.sweep.dir={folder}: holds" in line
    assert contents(done) | contents(sweep.folder) == before


def test_a_file_by_another_hand_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    """Run and sweep in the folder where the command is typed; a job's folder that holds something."""
    for name in ("config.yaml", "tokenizer.json", ".hydra", "train.log", "events.out.tfevents.1"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        (folder / "notes.txt").write_text("mine")
        line = the_line(run(*TINY, cwd=folder, folder=Path()))
        assert f"hydra.run.dir={folder}: {name}" in line
        assert contents(folder) == {folder / n: b"mine" for n in (name, "notes.txt")}
    (tmp_path / "s").mkdir()
    (tmp_path / "s/multirun.yaml").write_text("mine")
    line = the_line(run("-m", *TINY, "seed=0,1", cwd=tmp_path / "s", folder=Path()))
    assert f"hydra.sweep.dir={tmp_path}/s: multirun.yaml" in line
    (tmp_path / "s/multirun.yaml").rename(tmp_path / "s/.lock")
    line = the_line(run("-m", *TINY, "seed=0,1", cwd=tmp_path / "s", folder=Path()))
    assert f"{tmp_path}/s/.lock" in line
    (tmp_path / "t/0").mkdir(parents=True)
    (tmp_path / "t/0/config.yaml").write_text("mine")
    finished = run("-m", *TINY, "seed=0,1", folder=tmp_path / "t")
    assert finished.returncode == 2
    assert f"{tmp_path}/t/0: config.yaml" in finished.stderr.splitlines()[-1]
    assert contents(tmp_path / "t/0") == {tmp_path / "t/0/config.yaml": b"mine"}


def test_what_is_not_ours_may_be_beside_it(run: Run, tmp_path: Path) -> None:
    """And what a refused command left is no reason to choose another folder."""
    (tmp_path / "notes.txt").write_text("mine")
    refused = run(*TINY, "model.n_heads=3", folder=tmp_path)
    assert refused.returncode == 2 and (tmp_path / "summary.json").exists()
    assert run(*TINY, folder=tmp_path).returncode == 0
    assert json.loads((tmp_path / "summary.json").read_bytes())["status"] == "ok"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_refused_resume_leaves_the_run_as_it_was(run: Run, done: Path) -> None:
    before = contents(done)
    for wrong in (
        ["model.dim=64"],
        ["steps=1"],
        ["model.n_heads=3"],
        ["task=numerics"],
        ["clip=0", "model.train_only=absent", "plan=on"],
    ):
        refused = run(*TINY, *wrong, f"resume={done}", folder=done)
        assert refused.returncode == 2, refused.stderr
        assert contents(done) == before, wrong
    damaged = done / "checkpoints/step_00000002/state.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert run(*TINY, "steps=4", f"resume={done}", folder=done).returncode != 0
    assert contents(done) == before | {damaged: bytes(damaged.stat().st_size)}
    damaged.write_bytes(before[damaged])


def test_a_resume_with_nothing_to_do_says_so(run: Run, done: Path) -> None:
    before = contents(done)
    finished = run(*TINY, f"resume={done}", folder=done)
    assert finished.returncode == 0, finished.stderr
    assert "nothing to do" in finished.stdout
    assert contents(done) == before


def test_the_key_that_cannot_be_resolved_is_named(run: Run, tmp_path: Path) -> None:
    for flags in ([], ["-m"]):
        line = the_line(run(*flags, *TINY, "name=${oc.env:ABSENT}", outputs=tmp_path))
        assert "'ABSENT'" in line and "full_key: name" in line
    assert not list(tmp_path.iterdir())


def test_hydras_own_files_lie_inside(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("mine", encoding="utf-8")
    for subfolder in (tmp_path / "mine", "../mine", "."):
        refused = run(*TINY, f"hydra.output_subdir={subfolder}", folder=tmp_path / "run")
        assert f"hydra.output_subdir={subfolder}: name a folder inside" in the_line(refused)
    assert (tmp_path / "mine/config.yaml").read_text(encoding="utf-8") == "mine"
    outside = run("-m", *TINY, "seed=0,1", "hydra.sweep.subdir=../mine", folder=tmp_path / "sweep")
    assert outside.returncode == 2
    assert f"hydra.sweep.subdir: {tmp_path}/" in outside.stderr.splitlines()[-1]


def test_a_rerun_leaves_the_run_as_it_was(run: Run, tmp_path: Path) -> None:
    pickled = "+hydra.callbacks.p._target_=hydra.experimental.callbacks.PickleJobInfoCallback"
    assert run(*TINY, pickled, folder=tmp_path / "run").returncode == 0
    before = contents(tmp_path / "run")
    again = run("--experimental-rerun", str(tmp_path / "run/.hydra/config.pickle"))
    assert again.returncode == 2 and "type the run's overrides again" in again.stderr
    after = contents(tmp_path / "run")
    assert {path for path in before if before[path] != after.get(path)} <= {
        tmp_path / "run/train.log"
    }


@pytest.mark.parametrize(
    "ranks", [{"WORLD_SIZE": "2", "RANK": "1"}, {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}]
)
def test_several_ranks_are_refused(
    ranks: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match="one process"):
        check_single_process(ranks, None)
    check_single_process(dict.fromkeys(ranks, "1"), None)
    check_single_process({"SLURM_NTASKS": "2"}, None)  # the shell of an allocation: one process
    check_single_process(ranks | {"WORLD_SIZE": "1"}, "hydra_plugins.hydra_submitit_launcher.X")
