"""The processes of a sweep, and the signals that they hear. No torch."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from memtrain.errors import EXIT_FAILED, Stopped
from memtrain.owner import RANKS
from memtrain.run_folder import LOCK, STOP, write_text, writer_of
from memtrain.stop import ASK, StopRequest, exit_code

STOPPED = "stopped; go on with sweep.resume=true"

_job: "subprocess.Popen[bytes] | None" = None


own_folder: Path | None = None
"""Of the sweep, in its own process; None in those that a launcher has made for its jobs."""


def pass_on(number: int) -> None:
    """To the job that runs here, and to those that run in a launcher's workers."""
    if own_folder:
        with suppress(OSError):
            ask_workers(own_folder, number, exit_code(ASK))
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
        if own_folder is None:
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


def stopped(metric: float) -> float:
    """Raises Stopped in the sweep's process. A launcher's worker returns: the others still save."""
    if own_folder is None:
        return metric
    raise Stopped(exit_code(stop.requested), STOPPED)


def wait_for_jobs(folder: Path) -> None:
    """They may have lost the worker that would ask them."""
    for lock in folder.rglob(f"*/{LOCK}"):
        while process := writer_of(lock.parent):
            with suppress(OSError):
                os.kill(process, ASK)
            time.sleep(0.1)
