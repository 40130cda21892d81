"""What is typed for a sweep means in its jobs what it means in a run."""

import csv
import json
from pathlib import Path

import yaml
from command import Run

TINY = ["debug=tiny", "steps=2", "generate.tokens=0", "schedule.warmup=0"]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_interpolations_reach_the_jobs(run: Run, tmp_path: Path) -> None:
    """They are resolved there, where a job knows its number and its sweep; and the sweep is known again by them."""
    typed = [
        *("-m", *TINY[:-1], "schedule.warmup=${..log_every}", "seed=1,2"),
        *("clip=${hydra:job.num}", "generate.prompt=${hydra:runtime.cwd} ${oc.env:JOB}"),
        *("data.cache_dir=${hydra:sweep.dir}/c", "+hydra.job.env_set.JOB='n${hydra:job.num}'"),
    ]
    folder = tmp_path / "out"
    finished = run(*typed, cwd=tmp_path, folder=folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    for job in (0, 1):
        config = yaml.safe_load((folder / f"{job}/config.yaml").read_text(encoding="utf-8"))
        assert config["schedule"]["warmup"] == 1 and config["clip"] == job
        assert config["generate"]["prompt"] == f"{tmp_path} n{job}"
    assert [row["status"] for row in rows(folder)] == ["ok", "ok"]
    assert "schedule.warmup=${..log_every}" in json.loads((folder / "overrides.json").read_text())
    resumed = run(*typed, "sweep.resume=true", cwd=tmp_path, folder=folder)
    assert resumed.returncode == 0 and resumed.stdout.count(": kept") == 2
    alone = run(*TINY[:-1], "schedule.warmup=${..log_every}", "seed=1")
    assert alone.returncode == 0, alone.stderr


def test_what_a_callback_raises_ends_the_sweep(run: Run, tmp_path: Path) -> None:
    unknown = run("-m", *TINY, "seed=0,1", "hydra.sweep.dir=${hydra:absent.key}", outputs=tmp_path)
    assert unknown.returncode == 2
    (line,) = unknown.stderr.splitlines()
    assert line.startswith("error: ") and "absent" in line
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out/overrides.json").write_text("[")
    broken = run("-m", *TINY, "seed=0", "sweep.resume=true", folder=tmp_path / "out")
    assert broken.returncode == 2
    (line,) = broken.stderr.splitlines()
    assert line.startswith("error: ") and "overrides.json" in line
