"""A run's folder: which of its checkpoints are whole, where a run goes on, and who may write it. No torch.

outputs/runs/<name>/<date_time_pid>/
  checkpoints/step_00000200/ ...   see memtrain/engine/checkpoint.py
  metrics.jsonl, TensorBoard events, config.yaml, summary.json, ...
  .lock                            held by the process that writes here
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrain.errors import UserError

CHECKPOINTS = "checkpoints"
WEIGHTS, DIMENSIONS, OPTIMIZER = "model.safetensors", "model.json", "optimizer.safetensors"
STATE, CONFIG, META = "state.pt", "config.yaml", "meta.json"
FILES = (WEIGHTS, DIMENSIONS, OPTIMIZER, STATE, CONFIG)
"""Of a checkpoint; META, written last, knows how long they are."""
LOCK = ".lock"
METRICS = "metrics.jsonl"


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def complete(run_folder: Path) -> list[Path]:
    """The whole checkpoints of a run, by step; temporary and damaged ones are none."""
    return sorted((path for path in named(run_folder) if is_complete(path)), key=step_of)


def damaged(run_folder: Path) -> list[Path]:
    """Those that have the name of a checkpoint and are not whole."""
    return [path for path in named(run_folder) if not is_complete(path)]


def named(run_folder: Path) -> list[Path]:
    found = (run_folder / CHECKPOINTS).glob("step_*")
    return [path for path in found if re.fullmatch(r"step_\d+", path.name)]


def newest(run_folder: Path) -> Path | None:
    found = complete(run_folder)
    return found[-1] if found else None


def is_complete(checkpoint: Path) -> bool:
    """Whether every file is there, and as long as it was written."""
    try:
        sizes_bytes = read_meta(checkpoint)["sizes_bytes"]
        return all((checkpoint / name).stat().st_size == sizes_bytes[name] for name in FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Step, the validation loss that was measured at it, if any, and the sizes of the other files."""
    meta: dict[str, Any] = json.loads((checkpoint / META).read_text(encoding="utf-8"))
    return meta


def resumed_folder(runs: Path, resume: str | None, name: str, fresh_name: str) -> str:
    """Where a run called `name` writes: in the folder of the run that it goes on with, else in one of its own.

    A checkpoint that is not the last of its run starts
    a run of its own: what came after it stays.
    """
    fresh = str(runs / name / fresh_name)
    checkpoint = find_checkpoint(str(resume), runs / name, Path.cwd()) if resume else None
    if checkpoint is None:
        return fresh
    run_folder = checkpoint.parent.parent
    return str(run_folder) if newest(run_folder) == checkpoint else fresh


def find_checkpoint(resume: str, runs_of_name: Path, base: Path) -> Path | None:
    """The checkpoint that `resume` means: latest, a run's folder, or a checkpoint's. None: there is no whole one."""
    if resume == "latest":
        run_folder = last_trained(runs_of_name)
        return newest(run_folder) if run_folder else None
    path = (base / Path(resume).expanduser()).resolve()
    if re.fullmatch(r"step_\d+", path.name):
        return path if is_complete(path) else None
    return newest(path)


def last_trained(runs_of_name: Path) -> Path | None:
    """The run that trained last, whether it has saved anything or not."""
    trained = {}
    for folder in runs_of_name.glob("*"):
        marks = [path for path in (folder / METRICS, newest(folder)) if path and path.exists()]
        if marks:
            trained[folder] = max(path.stat().st_mtime for path in marks)
    return max(trained, key=lambda folder: trained[folder], default=None)


def write_text(path: Path, text: str) -> None:
    """Written under a temporary name and renamed: whoever reads it finds all of it, or what was there before."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, [text.encode()])
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, *parts: Iterable[bytes | memoryview]) -> None:
    """All of it is on the disk then."""
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                for piece in part:
                    while len(piece):  # a disk that fills up takes a part, then raises
                        piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # a write does not say where
        raise


def sync_folder(folder: Path) -> None:
    """Makes the names in it last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(run_folder: Path) -> Iterator[None]:
    """This process alone writes in `run_folder`. Raises UserError if another one does."""
    path = run_folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"{run_folder}: process {owner} is writing this run; wait for it, or stop it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
