"""A sweep as a whole: its folder, and one table and one plot at its end."""

import json
import math
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import OmegaConf, read_write

from memtrain.errors import EXIT_FAILED, Stopped, UserError
from memtrain.owner import (
    check_single_process,
    ends_the_process,
    hydra_files,
    report_error,
    resolve_parts,
)
from memtrain.run_folder import (
    JOB_FILES,
    OVERRIDES,
    RUN_FILES,
    STOP,
    SWEEP_FILES,
    locked,
    owned,
    read_summary,
    write_text,
)
from memtrain.stop import ASK, exit_code
from memtrain.sweep import processes
from memtrain.sweep.jobs import WRITES_NOTHING, of_the_job, quoted, read_overrides, typed
from memtrain.sweep.processes import STOPPED, ask_workers, stop, wait_for_jobs


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
        global _running
        processes.own_folder, _running = folder, (self, config)
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
        if processes.own_folder:
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
    if _running and processes.own_folder and stop.requested:
        wait_for_jobs(processes.own_folder)
        sweep, config = _running
        sweep._end(config, Stopped(exit_code(stop.requested), STOPPED))


def earlier_sweep(fresh: Path, overrides: list[str]) -> Path:
    """`fresh` if it holds a sweep of these overrides, else the newest beside it that does. Raises UserError."""
    folders = [fresh] if fresh.exists() else fresh.parent.glob("*")
    files = [path for folder in folders if (path := folder / OVERRIDES).exists()]
    same = [file for file in files if read_overrides(file) == overrides]
    if not same:
        raise UserError(
            f"sweep.resume=true: no sweep of the same overrides in {fresh.parent}; drop sweep.resume"
        )
    return max(same, key=lambda file: file.stat().st_mtime).parent


def use_folder(config: Any, folder: Path) -> None:
    """For the sweep, and for the configs of its jobs, which are composed anew."""
    with read_write(config.hydra):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        config.hydra.overrides.hydra.extend(WRITES_NOTHING)


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
