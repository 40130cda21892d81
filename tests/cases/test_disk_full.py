"""A disk that fills up while a checkpoint is written is named, with path and cause; nothing half stays."""

import resource
from pathlib import Path

from command import Start


def test_no_file_over_64_kib(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    started = start("debug=tiny", "save_every=1", "steps=3", folder=folder)
    resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
    ended = started.finish()
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "model.safetensors" in line and "File too large" in line
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "model.safetensors").exists()
