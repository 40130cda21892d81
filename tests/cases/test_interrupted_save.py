"""A process that dies while it writes leaves no checkpoint under a final name; the one before is what is resumed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from command import ENVIRONMENT, ROOT, Finished

from memtrain.run_folder import complete, damaged, newest, step_of

DIES = """
import os, runpy, sys
from memtrain.engine import snapshot
write, calls = snapshot.write_synced, []
def half(path, *parts):
    calls.extend([path] if path.name == "model.safetensors" else [])
    if len(calls) < 3:
        return write(path, *parts)
    data = b"".join(bytes(piece) for part in parts for piece in part)
    path.write_bytes(data[: len(data) // 2])
    os._exit(9)
snapshot.write_synced = half
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_death_in_the_third_save(tmp_path: Path) -> None:
    overrides = [
        "debug=tiny",
        "plan=off",
        "save_every=1",
        "keep=-1",
        f"hydra.run.dir={tmp_path}/out",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", DIES, str(ROOT / "train.py"), *overrides],
        cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 9, ended.stderr
    found = complete(tmp_path / "out")
    assert [step_of(path) for path in found] == [1, 2]
    assert not damaged(tmp_path / "out")


def test_half_a_file_under_a_final_name_is_passed_over(straight: Finished, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "run")
    weights = tmp_path / "run/checkpoints/step_00000010/model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    last = newest(tmp_path / "run")
    assert last is not None and step_of(last) == 5
    assert damaged(tmp_path / "run") == [weights.parent]
