"""Every way that Hydra offers to log what a job says."""

from pathlib import Path

import pytest
from command import Run

TINY = ["debug=tiny", "steps=2", "generate.tokens=0", "schedule.warmup=0"]


@pytest.mark.parametrize("kind", ["none", "stdout", "disabled", "default"])
def test_every_job_logging_works(kind: str, run: Run, tmp_path: Path) -> None:
    finished = run(*TINY, f"hydra/job_logging={kind}", folder=tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert (tmp_path / "out/train.log").exists() == (kind == "default")
    refused = run(*TINY, "model.n_heads=3", f"hydra/job_logging={kind}")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
