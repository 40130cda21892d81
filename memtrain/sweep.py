"""Sweeps: every job is a fresh process, a failing job is a row, the table comes at the end."""

import json
import logging
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import read_write

from memtrain.errors import EXIT_FAILED, EXIT_REFUSED, Stopped, UserError, print_error
from memtrain.run_folder import LOCK, SUMMARY, locked, newest, write_text
from memtrain.stop import ASK, StopRequest, exit_code

log = logging.getLogger("memtrain")

OVERRIDES = "overrides.json"
"""In a sweep's folder: what was typed, and so which jobs it has. In a job's: its own."""
LOG = "stderr.log"
STOPPED = "stopped; go on with sweep.resume=true"
_OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweep",
    "hydra.launch",
    "hydra/launch",
)


def run_job(
    program: list[str], settings: Any, resume: bool, metric_name: str, wrong: str | None
) -> float:
    """Run one job of a sweep (`settings` is Hydra's own config) and return its metric, the worst there is if it failed.

    `program` is started for it, unless its config is known to be `wrong`. With `resume` a job that is done is not run
    again, and one that has a checkpoint goes on from it, however it ended. Raises Stopped where a signal has ended it,
    UserError if it still runs or was begun with other overrides.
    """
    if stop.requested:
        raise Stopped(exit_code(stop.requested), STOPPED)
    folder = Path(settings.runtime.output_dir)
    overrides = of_the_job(settings.overrides.task)
    print(f"job {settings.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    before = read_summary(folder) if resume else None
    with locked(folder):
        if resume:
            check_same(folder / OVERRIDES, overrides)
        if before and before["status"] == "ok":
            print(f"job {settings.job.num}: kept", flush=True)
            return leave_summary(
                folder, before | {"kept": True, "job": settings.job.num}, metric_name
            )
        goes_on = resume and newest(folder) is not None  # what it has saved is kept
        if resume and not goes_on:
            clear(folder)
        for left_over in (SUMMARY, LOG):  # of an earlier sweep in this folder
            (folder / left_over).unlink(missing_ok=True)
        write_text(folder / OVERRIDES, json.dumps(overrides) + "\n")
    arguments = job_arguments(settings, folder) + ([f"resume={quoted(folder)}"] if goes_on else [])
    if wrong and not goes_on:
        code = refuse_job(wrong, folder)
    else:
        code = run_process([*program, *arguments], settings.runtime.cwd, folder / LOG)
    summary = read_summary(folder)
    if summary is None:
        status = "interrupted" if stop.requested else "failed"
        summary = {"status": status, "error": last_words(folder / LOG, code)}
    if code and summary["status"] == "ok" and not stop.requested:
        summary |= {"status": "failed", "error": f"ended with exit code {code} after its summary"}
    summary |= {"job": settings.job.num, "overrides": overrides, "exit_code": code}
    metric = leave_summary(folder, summary, metric_name)
    if code:
        print(
            f"job {settings.job.num} {summary['status']}: see {folder}/{LOG} and train.log",
            flush=True,
        )
    if stop.requested:
        raise Stopped(exit_code(stop.requested), STOPPED)
    return metric


def refuse_job(wrong: str, folder: Path) -> int:
    """As the job itself would, without a process for it. The exit code."""
    print_error(wrong)
    log.error(wrong)
    write_text(folder / LOG, f"error: {wrong}\n")
    write_text(folder / SUMMARY, json.dumps({"status": "refused", "error": wrong}) + "\n")
    return EXIT_REFUSED


def of_the_job(overrides: Iterable[str]) -> list[str]:
    """Without what says how to go on with it."""
    return [text for text in overrides if not text.startswith(("sweep.resume=", "resume="))]


def check_same(begun: Path, overrides: list[str]) -> None:
    """Raises UserError if the job was begun with other overrides, which a config file may hold."""
    before = json.loads(begun.read_text(encoding="utf-8")) if begun.exists() else overrides
    if before != overrides:
        raise UserError(
            f"sweep.resume=true: {begun.parent} was begun with {' '.join(before)}; bring that back, or sweep anew"
        )


def clear(folder: Path) -> None:
    """Of what a job left that is run again."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
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
    worst = -math.inf if metric_name == "tokens_per_second" else math.inf
    return worst if summary["status"] != "ok" or metric is None else float(metric)


def job_arguments(settings: Any, folder: Path) -> list[str]:
    """The command line that runs this one job by itself, in `folder`."""
    flags = ["--config-name", settings.job.config_name]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    own = [text for text in settings.overrides.hydra if not text.startswith(_OF_THE_SWEEP)]
    task = [text for text in settings.overrides.task if not text.startswith("sweep.resume=")]
    return [*flags, *task, *own, f"hydra.run.dir={quoted(folder)}"]


def quoted(folder: Path) -> str:
    """As the value of an override."""
    text = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


_job: "subprocess.Popen[bytes] | None" = None


def tell_job(number: int) -> None:
    if _job:
        _job.send_signal(number)


stop = StopRequest("this job is the last one", tell_job)
"""Entered for a whole sweep; the first signal lets the job that runs save and end."""


def run_process(command: list[str], cwd: str, log: Path) -> int:
    """The exit code; `log` keeps what the job said to stderr.

    It is out of reach of the terminal: signals come from here.
    """
    global _job
    _job = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, start_new_session=True)
    assert _job.stderr
    try:
        if stop.requested:  # before there was a process to hear of it
            tell_job(ASK)
        for line in _job.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
            with log.open("ab") as file:
                file.write(line)
        return _job.wait()
    except BaseException:
        _job.stderr.close()  # a job that nobody reads shall not wait for it
        _job.terminate()
        _job.wait()
        raise
    finally:
        _job = None


def read_summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


class SweepTable(Callback):  # type: ignore[misc]
    """Hydra callback: which folder a sweep writes to, and one table and one plot at its end.

    The exit code is 1 if a job failed, 128 + the signal's number if one ended the sweep.
    """

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self._started_s = time.time()
        self._held = ExitStack()  # to the end of the process
        self._held.enter_context(stop)
        overrides = of_the_job(config.hydra.overrides.task)
        try:
            folder = Path(config.hydra.sweep.dir)
            if config.sweep.resume:
                folder = earlier_sweep(folder, overrides)
            use_folder(config, folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(locked(folder))
            write_text(folder / OVERRIDES, json.dumps(overrides) + "\n")
        except (UserError, OSError) as error:
            sys.exit(self._told(error))

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle what a job needs: it holds no lock."""
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        error = job_return._return_value
        is_sweep = config.hydra.mode == RunMode.MULTIRUN
        if is_sweep and isinstance(error, (Stopped, UserError, OSError)):
            self._end(config, error)

    def _end(self, config: Any, error: Exception) -> NoReturn:
        try:
            self._report(config)
        finally:  # Hydra goes on after what a callback raises, but not after this
            sys.exit(self._told(error))

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        if self._report(config):
            sys.exit(EXIT_FAILED)

    def _told(self, error: Exception) -> int:
        """The exit code."""
        if isinstance(error, OSError):
            print(f"error: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
            return EXIT_FAILED
        print(f"error: {error}", file=sys.stderr)
        return error.code if isinstance(error, Stopped) else EXIT_REFUSED

    def _report(self, config: Any) -> bool:
        """Whether a job failed, or none is to be found."""
        folder = Path(config.hydra.sweep.dir)
        found = [path for path in folder.rglob(SUMMARY) if path.stat().st_mtime >= self._started_s]
        summaries = [json.loads(path.read_text(encoding="utf-8")) for path in found]
        summaries = [summary for summary in summaries if "job" in summary]  # else not of this sweep
        summaries.sort(key=lambda summary: summary["job"])
        report_sweep(folder, summaries)
        return not summaries or any(summary["status"] != "ok" for summary in summaries)


def earlier_sweep(fresh: Path, overrides: list[str]) -> Path:
    """`fresh` if it holds a sweep of these overrides, else the newest beside it that does. Raises UserError."""
    folders = [fresh] if fresh.exists() else fresh.parent.glob("*")
    files = [path for folder in folders if (path := folder / OVERRIDES).exists()]
    same = [file for file in files if json.loads(file.read_text(encoding="utf-8")) == overrides]
    if not same:
        raise UserError(
            f"sweep.resume=true: no sweep of the same overrides in {fresh.parent}; start it without"
        )
    return max(same, key=lambda file: file.stat().st_mtime).parent


def use_folder(config: Any, folder: Path) -> None:
    """For the sweep, and for the configs of its jobs, which are composed anew."""
    with read_write(config.hydra):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")


def report_sweep(folder: Path, summaries: list[dict[str, Any]]) -> None:
    from memtrain.report import console, tables

    rows = tables.sweep_rows(summaries)
    console.print_table(tables.sweep_table(rows))
    tables.write_sweep(rows, folder)
    if all(row["status"] == "refused" for row in rows):  # nothing to draw, nor to wait for
        print(f"{folder / 'sweep.md'} and sweep.csv hold the table", flush=True)
        return
    from memtrain.report import plots

    plots.save_png(plots.sweep_figure(rows), folder / "sweep.png")
    print(f"{folder / 'sweep.md'}, sweep.csv and sweep.png hold the table", flush=True)
