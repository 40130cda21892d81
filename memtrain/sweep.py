"""Sweeps: every job is a fresh process, a failing job is a row, the table comes at the end."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from memtrain.errors import EXIT_FAILED, EXIT_INTERRUPTED

STOP_WITHIN_S = 10
_OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.run.",
    "hydra.sweep",
    "hydra/sweep",
    "hydra.launch",
    "hydra/launch",
)


def run_job(script: Path, settings: Any) -> float:
    """Run one job of a sweep (`settings` is Hydra's own config) and return its metric; NaN if it failed."""
    folder = Path(settings.runtime.output_dir)
    overrides = list(settings.overrides.task)
    print(f"job {settings.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    for left_over in ("summary.json", "stderr.log"):  # of an earlier sweep in this folder
        (folder / left_over).unlink(missing_ok=True)
    command = [sys.executable, str(script), *job_arguments(settings, folder)]
    process = subprocess.Popen(command, cwd=settings.runtime.cwd, stderr=subprocess.PIPE)
    code = wait_for(process, folder / "stderr.log")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    summary = read_summary(folder)
    if summary is None:
        # What ended the process left no time to say so.
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        summary = {"status": "failed", "error": f"the process ended without a summary ({how})"}
    if code and summary["status"] == "ok":
        summary |= {"status": "failed", "error": f"ended with exit code {code} after its summary"}
    summary |= {"job": settings.job.num, "overrides": overrides, "exit_code": code}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if code:
        print(
            f"job {settings.job.num} {summary['status']}: see {folder}/stderr.log and train.log",
            flush=True,
        )
    metric = summary.get("metric")
    return float("nan") if code or metric is None else float(metric)


def job_arguments(settings: Any, folder: Path) -> list[str]:
    """The command line that runs this one job by itself, in `folder`."""
    flags = ["--config-name", settings.job.config_name]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    own = [text for text in settings.overrides.hydra if not text.startswith(_OF_THE_SWEEP)]
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return [*flags, *settings.overrides.task, *own, f'hydra.run.dir="{quoted}"']


def wait_for(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """The exit code; `log` keeps what the job said to stderr; whatever stops us stops the job too."""
    assert process.stderr
    try:
        for line in process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
            with log.open("ab") as file:
                file.write(line)
        return process.wait()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # Ctrl-C has reached the job too
            process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def read_summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


class SweepTable(Callback):  # type: ignore[misc]
    """Hydra callback: one table and one plot when all jobs are done, and exit code 1 if any failed."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self._started_s = time.time()

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        found = [
            path for path in folder.rglob("summary.json") if path.stat().st_mtime >= self._started_s
        ]
        summaries = [json.loads(path.read_text(encoding="utf-8")) for path in found]
        summaries.sort(key=lambda summary: summary["job"])
        report_sweep(folder, summaries)
        if any(summary["status"] != "ok" for summary in summaries):
            sys.exit(EXIT_FAILED)


def report_sweep(folder: Path, summaries: list[dict[str, Any]]) -> None:
    from memtrain.report import console, plots, tables

    rows = tables.sweep_rows(summaries)
    console.print_table(tables.sweep_table(rows))
    tables.write_sweep(rows, folder)
    plots.save_png(plots.sweep_figure(rows), folder / "sweep.png")
    print(f"{folder / 'sweep.md'}, sweep.csv and sweep.png hold the table", flush=True)
