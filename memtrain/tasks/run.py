"""One run: its folder, its lock, its summary, and the exit code that says how it ended. No torch.

So that what is refused need not wait for it.
"""

import errno
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from memtrain.config import Config, parse
from memtrain.config.derived import resolve_path
from memtrain.config.effects import no_effect_warnings
from memtrain.errors import (
    EXIT_FAILED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_REFUSED,
    NotFiniteError,
    NothingToDo,
    SaveError,
    Stopped,
    UserError,
    print_error,
    print_warning,
)
from memtrain.planner.child import PlannerProcess
from memtrain.run_folder import (
    CONFIG,
    SUMMARY,
    HeldLog,
    newest,
    read_summary,
    write_json,
    write_text,
)

log = logging.getLogger("memtrain")

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Place:
    """Where a run writes, the folder that relative paths start from, and what was typed."""

    folder: Path
    base: Path
    overrides: list[str] = field(default_factory=list)
    planner: PlannerProcess | None = None
    """Predicts a training run while it prepares; None: planning is off."""
    runs: Path | None = None
    """Where the runs of this name are; None: beside `folder`."""
    held: HeldLog | None = None
    """Of a run that goes on: its folder stays as it is until this is released."""


Task: TypeAlias = Callable[[Config, Place], dict[str, Any]]
"""Returns figures for the summary."""


def run_task(tree: dict[str, Any], place: Place, tasks: Mapping[str, Task]) -> float | None:
    """Run the one of `tasks` that the composed config names and leave summary.json, however it ends.

    A config that is refused needs no tasks. Returns the sweep's metric. Ends the process with the exit code of
    `memtrain.errors` if the task fails.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    make_paths_whole(tree, place.base)
    if tree.get("resume") and newest(place.folder):
        place = replace(place, held=HeldLog())
    summary: dict[str, Any] = {"status": "ok", "error": None, "task": tree.get("task")}
    summary |= {"overrides": place.overrides, "run_dir": str(place.folder)}
    try:
        if not place.held:
            write_config(tree, place.folder)
        config = checked(tree)
        summary |= tasks[config.task](config, place)
        summary["metric"] = summary.get(config.sweep.metric)
        if summary["status"] == "not_finite":
            raise NotFiniteError(summary["error"])
    except NothingToDo as done:
        print(done, flush=True)
        summary = read_summary(place.folder) or summary
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        status, code = outcome(error)
        summary |= {"status": status, "error": what_was_wrong(error, place.folder) or status}
        log.log(logging.ERROR, summary["error"], exc_info=status not in ("refused", "interrupted"))
        if code is None:
            raise
        print_error(summary["error"])
        if status == "failed":
            traceback.print_exc()
        sys.exit(code)
    finally:
        if not place.held or place.held.released:
            leave_summary(place.folder, summary)  # else the run is as it was
        if place.planner:
            place.planner.close()
    metric: float | None = summary.get("metric")
    return metric


PATHS = (("model", "path"), ("model", "config"), ("adapter", "path"))
"""Of what a run is made of: whoever goes on with it may do so from another folder."""


def make_paths_whole(tree: dict[str, Any], base: Path) -> None:
    for group, key in PATHS:
        given = tree.get(group, {}).get(key)
        if isinstance(given, str) and given:
            tree[group][key] = str(resolve_path(given, base))


def checked(tree: dict[str, Any]) -> Config:
    """The config, of which is told what has no effect. Raises UserError."""
    config = parse(tree)
    for warning in no_effect_warnings(config):
        print_warning(warning)
        log.warning(warning)
    return config


def leave_summary(folder: Path, summary: dict[str, Any]) -> None:
    try:
        write_json(folder / SUMMARY, summary)
    except OSError as error:  # how the run ended matters more
        print_warning(f"{folder / SUMMARY}: not written ({error.strerror})")


def what_was_wrong(error: BaseException, folder: Path) -> str:
    """In one line."""
    if isinstance(error, SystemExit):
        return ""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        text = (
            f"{error.filename or folder}: {error.strerror}; make room there, or let it be written"
        )
    return text


def write_config(tree: dict[str, Any], folder: Path) -> None:
    write_text(folder / CONFIG, yaml.safe_dump(tree, sort_keys=False))


def outcome(error: BaseException) -> tuple[str, int | None]:
    """Status and exit code of an error; no code: it ends the process by itself."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        print_error("interrupted; what was logged so far is in the run's folder")
        return "interrupted", None
    if isinstance(error, UserError):
        return "refused", EXIT_REFUSED
    if is_out_of_memory(error):
        return "out_of_memory", EXIT_OUT_OF_MEMORY
    if isinstance(error, Stopped):
        return "interrupted", error.code
    if isinstance(error, SaveError) or getattr(error, "errno", None) in DISK_ERRORS:
        return "not_saved", EXIT_FAILED
    if isinstance(error, NotFiniteError):
        return "not_finite", EXIT_NOT_FINITE
    return "failed", EXIT_FAILED


def is_out_of_memory(error: BaseException) -> bool:
    """On the device or the host, whose allocator has no error type of its own in torch."""
    torch = sys.modules.get("torch")  # which was not imported if the task never began
    if isinstance(error, (torch.OutOfMemoryError, MemoryError) if torch else MemoryError):
        return True
    text = str(error)
    return "can't allocate memory" in text or "Storage size calculation overflowed" in text
