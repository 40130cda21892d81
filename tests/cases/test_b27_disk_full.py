"""A disk that fills up while a checkpoint is written is named, with path and cause; nothing half stays."""

import resource
import subprocess
import sys
from pathlib import Path

from command import ENVIRONMENT, ROOT


def test_no_file_over_64_kib(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    overrides = ["debug=tiny", "plan=off", "save_every=1", "steps=3", f"hydra.run.dir={folder}"]
    limit = (2**16, 2**16)
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "model.safetensors" in line and "File too large" in line
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "model.safetensors").exists()
