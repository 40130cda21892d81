"""Sweeps: every job is a fresh process, a failing job is a row, the table comes at the end."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import OmegaConf, read_write

from memtrain.errors import EXIT_FAILED, EXIT_REFUSED, Stopped, UserError, print_error
from memtrain.owner import (
    RANKS,
    check_single_process,
    ends_the_process,
    hydra_files,
    report_error,
    resolve_parts,
)
from memtrain.run_folder import (
    JOB_FILES,
    JOB_LOG,
    LOCK,
    OVERRIDES,
    RUN_FILES,
    STOP,
    SUMMARY,
    SWEEP_FILES,
    locked,
    newest,
    owned,
    read_summary,
    taken,
    write_text,
    writer_of,
)
from memtrain.stop import ASK, StopRequest, exit_code, leave_signals

STOPPED = "stopped; go on with sweep.resume=true"
_OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweep",
    "hydra.launch",
    "hydra/launch",
)
_WRITES_NOTHING = ("++hydra.output_subdir=null", "++hydra.job_logging.root=null")
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
    if _folder is None:
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


def stopped(metric: float) -> float:
    """Raises Stopped in the sweep's process. A launcher's worker returns: the others still save."""
    if _folder is None:
        return metric
    raise Stopped(exit_code(stop.requested), STOPPED)


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
            f"sweep.resume=true: {begun.parent} was begun with {' '.join(before)}; bring that back, or sweep anew"
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
    given = [text for text in typed(settings.overrides.hydra) if text not in _WRITES_NOTHING]
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


_job: "subprocess.Popen[bytes] | None" = None


_folder: Path | None = None
"""Of the sweep, in its own process; None in those that a launcher has made for its jobs."""


def pass_on(number: int) -> None:
    """To the job that runs here, and to those that run in a launcher's workers."""
    if _folder:
        with suppress(OSError):
            ask_workers(_folder, number, exit_code(ASK))
    if _job:
        _job.send_signal(number)


stop = StopRequest("no other job begins", pass_on)
"""Entered for a whole sweep; the first signal lets the jobs that run save and end."""


def ask_workers(folder: Path, number: int, code: int) -> None:
    """Their jobs get the signal, none begins any more; the sweep ends with `code`."""
    write_text(folder / STOP, json.dumps({"signal": number, "code": code}))


def is_stopped(folder: Path) -> bool:
    return bool(stop.requested) or (folder / STOP).exists()


def watch(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """In a worker: its job is told what the sweep's process has heard."""
    told = 0
    while job.poll() is None:
        if (folder / STOP).exists():
            number = json.loads((folder / STOP).read_text(encoding="utf-8"))["signal"]
            if number != told:
                job.send_signal(number)
                told = number
        time.sleep(0.1)
    if told == signal.SIGKILL:
        os._exit(EXIT_FAILED)  # nobody is left to work for


def run_process(command: list[str], cwd: str, log: Path, sweep_folder: Path) -> int:
    """The exit code; `log` keeps what the job said to stderr.

    It is out of reach of the terminal: signals come from here. It is one process, however many this one is of.
    """
    global _job
    environment = {key: value for key, value in os.environ.items() if key not in dict(RANKS)}
    _job = subprocess.Popen(
        command, cwd=cwd, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    assert _job.stderr
    try:
        if _folder is None:
            threading.Thread(target=watch, args=(_job, sweep_folder), daemon=True).start()
        if stop.requested:  # before there was a process to hear of it
            _job.send_signal(ASK)
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


class SweepTable(Callback):  # type: ignore[misc]
    """Hydra callback: which folder a sweep writes to, and one table and one plot at its end.

    The exit code is 1 if a job failed, 128 + the signal's number if one ended the sweep.
    """

    @ends_the_process
    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self._held = ExitStack()  # to the end of the process
        self._held.enter_context(stop)
        check_single_process(os.environ, OmegaConf.select(config, "hydra.launcher._target_"))
        resolve_parts(config)
        overrides = of_the_job(typed(config.hydra.overrides.task))
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        if config.sweep.resume:
            folder = earlier_sweep(folder, overrides)
            self._held.enter_context(locked(folder))
        else:
            names = [*RUN_FILES, *SWEEP_FILES, *JOB_FILES, *hydra_files(config)]
            self._held.enter_context(owned(folder, names, "hydra.sweep.dir"))
        global _folder, _running
        _folder, _running = folder, (self, config)
        (folder / STOP).unlink(missing_ok=True)
        use_folder(config, folder)
        write_text(folder / OVERRIDES, json.dumps(overrides) + "\n")

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle what a job needs: it holds no lock."""
        return {name: value for name, value in vars(self).items() if name != "_held"}

    @ends_the_process
    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        error = job_return._return_value
        if config.hydra.mode != RunMode.MULTIRUN or not isinstance(error, Exception):
            return
        if _folder:
            self._end(config, error)
        ask_workers(Path(config.hydra.sweep.dir), ASK, report_error(error))
        job_return.return_value, job_return.status = math.inf, JobStatus.COMPLETED

    def _end(self, config: Any, error: Exception) -> NoReturn:
        try:
            self._report(config)
        finally:  # Hydra goes on after what a callback raises, but not after this
            sys.exit(report_error(error))

    @ends_the_process
    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        if stop.requested:
            self._end(config, Stopped(exit_code(stop.requested), STOPPED))
        has_failed, asked = self._report(config), Path(config.hydra.sweep.dir) / STOP
        if asked.exists():  # by a worker, which has said why
            sys.exit(json.loads(asked.read_text(encoding="utf-8"))["code"])
        if has_failed:
            sys.exit(EXIT_FAILED)

    def _report(self, config: Any) -> bool:
        """Whether a job failed, or none is to be found."""
        folder = Path(config.hydra.sweep.dir)
        found = [read_summary(path.parent) or {} for path in folder.rglob(OVERRIDES)]
        summaries = [summary for summary in found if summary.get("sweep_dir") == str(folder)]
        summaries.sort(key=lambda summary: summary["job"])
        report_sweep(folder, summaries)
        return not summaries or any(summary["status"] != "ok" for summary in summaries)


_running: tuple[SweepTable, Any] | None = None
"""The sweep of this process, and its config."""


def end_if_stopped() -> None:
    """Ends the process where a signal has ended a sweep, whatever a launcher made of it that lost a worker."""
    if _running and _folder and stop.requested:
        wait_for_jobs(_folder)
        sweep, config = _running
        sweep._end(config, Stopped(exit_code(stop.requested), STOPPED))


def wait_for_jobs(folder: Path) -> None:
    """They may have lost the worker that would ask them."""
    for lock in folder.rglob(f"*/{LOCK}"):
        while process := writer_of(lock.parent):
            with suppress(OSError):
                os.kill(process, ASK)
            time.sleep(0.1)


def earlier_sweep(fresh: Path, overrides: list[str]) -> Path:
    """`fresh` if it holds a sweep of these overrides, else the newest beside it that does. Raises UserError."""
    folders = [fresh] if fresh.exists() else fresh.parent.glob("*")
    files = [path for folder in folders if (path := folder / OVERRIDES).exists()]
    same = [file for file in files if read_overrides(file) == overrides]
    if not same:
        raise UserError(
            f"sweep.resume=true: no sweep of the same overrides in {fresh.parent}; start it without"
        )
    return max(same, key=lambda file: file.stat().st_mtime).parent


def read_overrides(file: Path) -> Any:
    """Raises UserError if it is no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({error}); restore it, or sweep anew") from error


def use_folder(config: Any, folder: Path) -> None:
    """For the sweep, and for the configs of its jobs, which are composed anew."""
    with read_write(config.hydra):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        config.hydra.overrides.hydra.extend(_WRITES_NOTHING)


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
