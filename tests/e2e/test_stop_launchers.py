"""One stop for all launchers: jobs that run save and end, none begins, the table comes."""

import os
import signal
from pathlib import Path

import pytest
from command import Start, processes_with
from test_sweep_overrides import rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_one_signal_ends_jobs_side_by_side(
    number: signal.Signals, code: int, start: Start, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of the terminal but the jobs, SIGTERM the sweep's own."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    folder = tmp_path / "out"
    started = start(
        *("-m", *launcher, "debug=tiny", "seed=0,1,2,3,4", "steps=1000000", "save_every=0"),
        folder=folder,
    )
    for job in "01":
        while not (folder / job / "metrics.jsonl").exists():
            started.wait_for_line("step ")
    (os.killpg if number == signal.SIGINT else os.kill)(started.process.pid, number)
    finished = started.finish(60)
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    assert finished.stderr.splitlines()[-1] == "error: stopped; go on with sweep.resume=true"
    assert [row["status"] for row in rows(folder)] == ["interrupted", "interrupted"]
    assert all("saved at step" in row["error"] for row in rows(folder))
    assert "2 jobs" in finished.stdout
    assert not processes_with(str(folder))
