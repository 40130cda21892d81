"""`python train.py` as a process of its own, forked or new."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0
ENCODING: Any = {"encoding": "utf-8", "errors": "replace"}
# No card: what is asserted here holds on every machine.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

TINY_TEXT = [
    "data=text",
    "tokenizer=bytes",
    "model.dim=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.max_seq_len=64",
    "steps=6",
    "schedule.warmup=2",
    "micro_batch=2",
    "seq_len=16",
    "log_every=1",
    "eval_every=3",
    "eval_sequences=4",
    "generate.tokens=8",
]
"""Overrides of a run on text that takes a second once torch is imported; `data.path` is missing."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended, and the folder of its run or sweep."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path


class WarmProcess:
    """What a program uses of `subprocess.Popen`, of a command that the server forks (train_server)."""

    def __init__(self, address: str, argv: list[str], cwd: str, stdout: int | None = None) -> None:
        """Its stdout goes to `stdout`, or can be read here as text, as its stderr then is."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        read, write = os.pipe()
        pipes, ends = [read], [write]
        if stdout is None:
            read, write = os.pipe()
            pipes, ends = [read, *pipes], [write, *ends]
        request = json.dumps({"argv": argv, "cwd": cwd}).encode()
        socket.send_fds(self._connection, [request], ends if stdout is None else [stdout, *ends])
        for end in ends:
            os.close(end)
        self.stderr = open(pipes[-1], "rb" if stdout else "r", **({} if stdout else ENCODING))  # noqa: SIM115, PTH123
        self.stdout = open(pipes[0], **ENCODING) if stdout is None else None  # noqa: SIM115, PTH123
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._answers.readline())
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left to read of both, once it has ended."""
        found: dict[str, str] = {}

        def read(name: str) -> None:
            with getattr(self, name) as stream:
                found[name] = stream.read()

        threads = [threading.Thread(target=read, args=(name,)) for name in ("stdout", "stderr")]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return found["stdout"], found["stderr"]


@dataclass
class Started:
    """A command that still runs, the leader of a process group of its own."""

    process: "subprocess.Popen[str] | WarmProcess"
    folder: Path

    def finish(self, timeout: float = TIMEOUT_S) -> Finished:
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.returncode is not None
        return Finished(self.process.returncode, stdout, stderr, self.folder)

    def wait_for_line(self, beginning: str) -> None:
        """Read stdout up to a line that begins so."""
        assert self.process.stdout
        assert any(line.startswith(beginning) for line in self.process.stdout)


def processes_with(text: str) -> list[int]:
    """The living processes whose command line, or the name of a file that they hold open, has `text` in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            names = [str(path.readlink()) for path in (process / "fd").iterdir()]
            if text in (process / "cmdline").read_text() or any(text in name for name in names):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


Start = Callable[..., Started]
Run = Callable[..., Finished]


class Server:
    """Forks commands from a process that has imported all (train_server)."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/server"
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/train_server.py"), self._address],
            env=ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=hear_signals,
        )
        assert self._process.stdout
        self._process.stdout.readline()

    def start(self, overrides: list[str], cwd: Path, folder: Path) -> Started:
        argv = [str(ROOT / "train.py"), *overrides]
        return Started(WarmProcess(self._address, argv, str(cwd)), folder)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def with_places(overrides: list[str], folder: Path, outputs: Path | None) -> list[str]:
    """What is written goes to `folder`, or into `outputs` as the config says."""
    if not any(text.startswith("plan=") for text in overrides):
        overrides = [
            *overrides,
            "plan=off",
        ]  # a second process per run, where planning is not the point
    places = [f"{key}={folder}" for key in ("hydra.run.dir", "hydra.sweep.dir")]
    return [*overrides, f"outputs={outputs}"] if outputs else [*overrides, *places]


def hear_signals() -> None:
    """What runs the tests may ignore them (nohup, a background job), and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_interpreter(overrides: list[str], cwd: Path, folder: Path) -> Started:
    """A new interpreter in `cwd`: seconds, for where its start is what is tested."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hear_signals,
        **ENCODING,
    )
    return Started(process, folder)
