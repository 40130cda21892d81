"""A run's folder: which of its checkpoints are whole, where a run goes on, and who may write it. No torch.

outputs/runs/<name>/<date_time_pid>/
  checkpoints/step_00000200/ ...   see memtrain/engine/checkpoint.py
  metrics.jsonl, TensorBoard events, config.yaml, summary.json, ...
  .lock                            held by the process that writes here
"""

import fcntl
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from memtrain.errors import UserError

CHECKPOINTS = "checkpoints"
WEIGHTS, DIMENSIONS, OPTIMIZER = "model.safetensors", "model.json", "optimizer.safetensors"
STATE, CONFIG, META = "state.pt", "config.yaml", "meta.json"
FILES = (WEIGHTS, DIMENSIONS, OPTIMIZER, STATE, CONFIG)
"""Of a checkpoint; META, written last, knows how long they are."""
COUNTERS = ("stepped", "skipped_in_a_row")
"""In META: how many steps were finite so far, and how many since then were not."""
LOCK = ".lock"
METRICS, SUMMARY, PLAN = "metrics.jsonl", "summary.json", "plan.json"
OVERRIDES, JOB_LOG = "overrides.json", "stderr.log"
"""By a sweep: what was typed for it, and in each job's folder what that job was given, and what it said."""
RUN_RESULTS = (
    *(METRICS, PLAN, CHECKPOINTS, WEIGHTS, DIMENSIONS, "tokenizer.json", "events.out.tfevents.*"),
    *("hf", "adapter"),
    *("timeline.png", "numerics.png", "memory_snapshot.pickle"),
)
RUN_FILES = (CONFIG, SUMMARY, *RUN_RESULTS)
MULTIRUN = "multirun.yaml"
STOP = ".stop"
"""The signal that the jobs of a sweep are to hear, and its exit code."""
SWEEP_FILES = (MULTIRUN, STOP, "optimization_results.yaml", "sweep.md", "sweep.csv", "sweep.png")
JOB_FILES = (OVERRIDES, JOB_LOG)


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def complete(run_folder: Path) -> list[Path]:
    """The whole checkpoints of a run, by step; temporary and damaged ones are none."""
    listed = named(run_folder)
    whole = sorted((path for path in listed if is_complete(path)), key=step_of)
    if not whole and set(listed) != set(named(run_folder)):
        return complete(run_folder)  # a living run has put another in their place
    return whole


def damaged(run_folder: Path) -> list[Path]:
    """Those that have the name of a checkpoint and are not whole."""
    return [path for path in named(run_folder) if not is_complete(path)]


def named(run_folder: Path) -> list[Path]:
    try:
        return [path for path in (run_folder / CHECKPOINTS).glob("step_*") if is_checkpoint(path)]
    except OSError:  # such as a name that is too long for one
        return []


def newest(run_folder: Path) -> Path | None:
    found = complete(run_folder)
    return found[-1] if found else None


def is_complete(checkpoint: Path) -> bool:
    """Whether every file is there, and as long as it was written."""
    try:
        meta = read_meta(checkpoint)
        sizes_bytes = meta["sizes_bytes"]
        as_written = ((checkpoint / name).stat().st_size == sizes_bytes[name] for name in FILES)
        counters = (meta.get(key, 0) for key in COUNTERS)
        return (
            "val_loss" in meta
            and all(isinstance(number, int) for number in counters)
            and all(as_written)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Step, COUNTERS, the validation loss that was measured at it, if any, and the sizes of the other files."""
    meta: dict[str, Any] = json.loads((checkpoint / META).read_text(encoding="utf-8"))
    return meta


def stepped(checkpoint: Path) -> int | None:
    """Finite steps up to it; None: not noted, as in older ones."""
    return read_meta(checkpoint).get("stepped")


def is_good(checkpoint: Path) -> bool:
    """Whether its own step was finite, as far as that is noted."""
    return not read_meta(checkpoint).get("skipped_in_a_row")


def went_on(checkpoint: Path, so_far: int | None) -> bool:
    """Whether a finite step was made from its weights, where a run has made `so_far`. Skipped ones change nothing."""
    here = stepped(checkpoint)
    return here is not None and so_far is not None and here < so_far


def resumed_folder(runs: Path, resume: str | None, name: str, fresh_name: str) -> str:
    """Where a run called `name` writes: in the folder of the run that it goes on with, else in one of its own.

    A checkpoint that is not the last of its run starts a run of its own: what came after it stays.
    """
    going_on = None
    if resume == "latest":
        going_on = last_trained(runs / name)
    elif resume:
        path = full_path(resume, Path.cwd())
        going_on = path.parent.parent if is_checkpoint(path) else path
        if is_checkpoint(path) and newest(going_on) != path:
            going_on = None
    return str(going_on if going_on and newest(going_on) else runs / name / fresh_name)


def named_checkpoint(resume: str, base: Path) -> Path | None:
    """What a path means, which is a run's or a checkpoint's. None: there is no whole one."""
    path = full_path(resume, base)
    if is_checkpoint(path):
        return path if is_complete(path) else None
    return newest(path)


def full_path(resume: str, base: Path) -> Path:
    return Path(os.path.realpath(base / Path(resume).expanduser()))


def is_checkpoint(path: Path) -> bool:
    """By its name."""
    return re.fullmatch(r"step_\d+", path.name) is not None


def last_trained(runs_of_name: Path) -> Path | None:
    """The run that trained last, whether it has saved anything or not."""
    trained = {folder: trained_at_s(folder) for folder in runs_of_name.glob("*")}
    last = max(trained, key=lambda folder: trained[folder], default=None)
    return last if last and trained[last] else None


def trained_at_s(run_folder: Path) -> float:
    """When it last wrote a record or a checkpoint; 0: never."""
    found = 0.0
    for path in (run_folder / METRICS, newest(run_folder)):
        with suppress(OSError):
            found = max(found, path.stat().st_mtime if path else 0.0)
    return found


def write_text(path: Path, text: str) -> None:
    """Written under a temporary name and renamed: whoever reads it finds all of it, or what was there before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, [text.encode()])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """NaN and infinity become null."""
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


class HeldLog:
    """What is logged, until it is known that a finished run really goes on: only then it is written in its folder."""

    def __init__(self) -> None:
        self.released = False
        self._memory = MemoryHandler(2**20, flushLevel=2**20, flushOnClose=False)
        self._handlers = logging.root.handlers[:]
        logging.root.handlers[:] = [self._memory]

    def release(self) -> None:
        self.released = True
        logging.root.handlers[:] = self._handlers
        for record in self._memory.buffer:
            logging.root.callHandlers(record)


# --- whose it is --------------------------------------------------------------------------------------------------


def goes_on_in(folder: Path, resume: str | None, base: Path) -> bool:
    """Whether the run in `folder` is the one that `resume` goes on with. Raises UserError if it is another one."""
    there = newest(folder) if resume else None
    if not resume or there is None:
        return False
    checkpoint = there if resume == "latest" else named_checkpoint(resume, base)
    if checkpoint is None:
        raise UserError(
            f"resume={resume}: no complete checkpoint in {resume}; drop resume, or name another run"
        )
    if not there.samefile(checkpoint):
        raise UserError(
            f"hydra.run.dir={folder}: holds another run than {checkpoint}; choose another folder"
        )
    return True


@contextmanager
def owned(folder: Path, names: Iterable[str], key: str) -> Iterator[None]:
    """`locked`, and nothing in `folder` was called as one of `names` before.

    Raises UserError, which names the `key` that says the folder, before anything is written.
    """
    names = list(names)
    try:
        refuse_taken(folder, names, key)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}={folder}: {error.filename}: {error.strerror}") from error
    with locked(folder):
        refuse_taken(folder, names, key)  # by who held the lock a moment ago
        yield


def refuse_taken(folder: Path, names: list[str], key: str) -> None:
    found = taken(folder, names)
    if not found or was_refused(folder) or has_no_job(folder):
        return
    what = f"{', '.join(sorted(found))} would be overwritten"
    if (folder / LOCK).exists():
        what = f"holds a {'sweep' if found & {*SWEEP_FILES, *JOB_FILES} else 'run'} already"
    raise UserError(f"{key}={folder}: {what}; choose another folder")


def taken(folder: Path, names: Iterable[str]) -> set[str]:
    """What is called in `folder` as one of `names`, which are patterns, or as it is while that is written."""
    patterns = [pattern for name in names for pattern in (name, f".{name}.tmp")]
    there = os.listdir(folder) if folder.exists() else []  # noqa: PTH208  with links to nowhere
    return {name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns)}


def was_refused(folder: Path) -> bool:
    """Whether all that a run left there is the reason why it was refused."""
    if taken(folder, (*RUN_RESULTS, *SWEEP_FILES, *JOB_FILES)):
        return False
    with suppress(ValueError, AttributeError):  # else a summary of another program
        return (read_summary(folder) or {}).get("status") == "refused"
    return False


def has_no_job(folder: Path) -> bool:
    """Whether all that a sweep left there is what was typed: a job could not be composed."""
    ours = (OVERRIDES, MULTIRUN)
    return taken(folder, (*RUN_FILES, *SWEEP_FILES, *JOB_FILES)) == set(ours) and not any(
        folder.glob(f"*/**/{OVERRIDES}")
    )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """None: there is none. Raises ValueError where another wrote a file of that name."""
    path = folder / SUMMARY
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


@contextmanager
def locked(run_folder: Path) -> Iterator[None]:
    """This process alone writes in `run_folder`. Raises UserError if another one does."""
    path = run_folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another folder") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{run_folder}: process {_owner(descriptor)} is writing this run; wait for it, or stop it"
            ) from None
        if not re.fullmatch(r"\d+|unknown", _owner(descriptor)):
            raise UserError(f"{path}: another program's file; choose another folder")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    """Who wrote the lock's file last."""
    text = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
    return text or "unknown"


def writer_of(run_folder: Path) -> int | None:
    """The process that holds the lock of `run_folder`; None: none does."""
    with suppress(OSError, ValueError), (run_folder / LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(_owner(file.fileno()))
    return None
