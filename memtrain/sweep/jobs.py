"""One job of a sweep: a process of its own, and a row of the table however it ends."""

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from memtrain.errors import EXIT_REFUSED, UserError, print_error
from memtrain.run_folder import (
    JOB_FILES,
    JOB_LOG,
    OVERRIDES,
    RUN_FILES,
    SUMMARY,
    SWEEP_FILES,
    newest,
    owned,
    read_summary,
    taken,
    write_text,
)
from memtrain.stop import leave_signals
from memtrain.sweep import processes
from memtrain.sweep.processes import is_stopped, run_process, stopped

_OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweep",
    "hydra.launch",
    "hydra/launch",
)
WRITES_NOTHING = ("++hydra.output_subdir=null", "++hydra.job_logging.root=null")
"""For the config that Hydra runs a job with here: its folder is written by the process of its own."""


def run_job(
    program: list[str], settings: Any, resume: bool, metric_name: str, wrong: str | None
) -> float:
    """Run one job of a sweep (`settings` is Hydra's own config) and return its metric, the worst there is if it failed.

    `program` is started for it, unless its config is known to be `wrong`. With `resume` a job that is done is not run
    again, and one that has a checkpoint goes on from it, however it ended. Raises Stopped where a signal has ended it,
    UserError if it still runs or was begun with other overrides.
    """
    sweep_folder = Path(settings.sweep.dir)
    if processes.own_folder is None:
        leave_signals()
    if is_stopped(sweep_folder):
        return stopped(worst(metric_name))
    folder = Path(settings.runtime.output_dir)
    check_is_inside(folder, sweep_folder)
    overrides = of_the_job(typed(settings.overrides.task))
    print(f"job {settings.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    of_sweep = {"job": settings.job.num, "sweep_dir": settings.sweep.dir}
    goes_on = resume and (folder / OVERRIDES).exists()
    names = () if goes_on else job_files(settings)
    with owned(folder, names, "hydra.sweep.subdir"):
        if goes_on:
            check_same(folder / OVERRIDES, overrides)
        before = read_summary(folder) if goes_on else None
        if before and before["status"] == "ok":
            print(f"job {settings.job.num}: kept", flush=True)
            return leave_summary(folder, before | of_sweep | {"kept": True}, metric_name)
        has_saved = newest(folder) is not None
        if goes_on:
            clear(folder, (SUMMARY, JOB_LOG) if has_saved else job_files(settings))
        write_text(folder / OVERRIDES, json.dumps(overrides) + "\n")
    arguments = job_arguments(settings, folder) + (
        [f"resume={quoted(folder)}"] if has_saved else []
    )
    if wrong and not has_saved:
        code = refuse_job(wrong, folder, f"{settings.job.name}.log")
    else:
        command = [*program, *arguments]
        code = run_process(command, settings.runtime.cwd, folder / JOB_LOG, sweep_folder)
    is_last = is_stopped(sweep_folder)
    summary = read_summary(folder)
    if summary is None:
        status = "interrupted" if is_last else "failed"
        summary = {"status": status, "error": last_words(folder / JOB_LOG, code)}
    if code and summary["status"] == "ok" and not is_last:
        summary |= {"status": "failed", "error": f"ended with exit code {code} after its summary"}
    summary |= of_sweep | {"overrides": overrides, "exit_code": code}
    metric = leave_summary(folder, summary, metric_name)
    if code:
        print(
            f"job {settings.job.num} {summary['status']}: see {folder}/{JOB_LOG} and train.log",
            flush=True,
        )
    return stopped(metric) if is_last else metric


def check_is_inside(folder: Path, sweep_folder: Path) -> None:
    """Raises UserError for a job's folder that the sweep's table would not find."""
    of_job, of_sweep = (Path(os.path.abspath(path)) for path in (folder, sweep_folder))  # noqa: PTH100
    if of_sweep not in of_job.parents:
        raise UserError(
            f"hydra.sweep.subdir: {folder} is not inside {sweep_folder}; name a folder below hydra.sweep.dir"
        )


def refuse_job(wrong: str, folder: Path, log: str) -> int:
    """As the job itself would, without a process for it. The exit code."""
    print_error(wrong)
    for name in (JOB_LOG, log):
        write_text(folder / name, f"error: {wrong}\n")
    write_text(folder / SUMMARY, json.dumps({"status": "refused", "error": wrong}) + "\n")
    return EXIT_REFUSED


def of_the_job(overrides: Iterable[str]) -> list[str]:
    """Without what says how to go on with it."""
    return [text for text in overrides if not text.startswith(("sweep.resume=", "resume="))]


def typed(overrides: Any) -> list[str]:
    """As they were typed: what is interpolated in them is resolved where they are applied."""
    return list(OmegaConf.to_container(overrides, resolve=False))  # type: ignore[arg-type]


def check_same(begun: Path, overrides: list[str]) -> None:
    """Raises UserError if the job was begun with other overrides, which a config file may hold."""
    before = read_overrides(begun)
    if before != overrides:
        raise UserError(
            f"sweep.resume=true: {begun.parent} was begun with {' '.join(before)}; restore those, or start a new sweep"
        )


def job_files(settings: Any) -> list[str]:
    return [*RUN_FILES, *SWEEP_FILES, *JOB_FILES, f"{settings.job.name}.log", ".hydra"]


def clear(folder: Path, names: Iterable[str]) -> None:
    """Of what a job left there that is run again; what somebody else put beside it stays."""
    for path in (folder / name for name in taken(folder, names)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def last_words(log: Path, code: int) -> str:
    """Why a process ended that left no summary."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return errors[-1].removeprefix("error: ") if errors else f"ended without a summary ({how})"


def leave_summary(folder: Path, summary: dict[str, Any], metric_name: str) -> float:
    """The metric in it comes back; without one an infinity, as sweepers end at a NaN."""
    write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    metric = summary.get("metric")
    if summary["status"] != "ok" or metric is None:
        return worst(metric_name)
    return float(metric)


def worst(metric_name: str) -> float:
    return -math.inf if metric_name == "tokens_per_second" else math.inf


def job_arguments(settings: Any, folder: Path) -> list[str]:
    """The command line that runs this one job by itself, in `folder`; it knows its number and its sweep."""
    flags = ["--config-name", settings.job.config_name]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    given = [text for text in typed(settings.overrides.hydra) if text not in WRITES_NOTHING]
    own = [text for text in given if not text.startswith(_OF_THE_SWEEP)]
    task = [text for text in typed(settings.overrides.task) if not text.startswith("sweep.resume=")]
    return [
        *(*flags, *task, *own),
        f"hydra.job.num={settings.job.num}",
        f"hydra.job.id={quoted(settings.job.id)}",
        f"hydra.sweep.dir={quoted(settings.sweep.dir)}",
        f"hydra.run.dir={quoted(folder)}",
    ]


def quoted(value: object) -> str:
    """As the value of an override."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def read_overrides(file: Path) -> Any:
    """Raises UserError if it is no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file}: cannot be read ({error}); restore it, or start a new sweep"
        ) from error
