"""`python train.py` as a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0
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


@dataclass
class Started:
    """A process that still runs, the leader of a process group of its own."""

    process: "subprocess.Popen[str]"
    folder: Path

    def finish(self, timeout: float = TIMEOUT_S) -> Finished:
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return Finished(self.process.returncode, stdout, stderr, self.folder)

    def wait_for_line(self, beginning: str) -> None:
        """Read stdout up to a line that begins so."""
        assert self.process.stdout
        assert any(line.startswith(beginning) for line in self.process.stdout)


def processes_with(text: str) -> list[int]:
    """The living processes whose command line has `text` in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


Start = Callable[..., Started]
Run = Callable[..., Finished]


class Server:
    """Runs one command after the other, each forked from a process that has imported all (train_server)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/train_server.py")],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            text=True,
            encoding="utf-8",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, argv: list[str], cwd: Path, folder: Path, limit_s: float) -> Finished:
        assert self._process.stdin and self._process.stdout
        command = {"argv": argv, "cwd": str(cwd), "limit_s": int(limit_s)}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        if found["code"] == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(argv, limit_s, found["stdout"], found["stderr"])
        return Finished(found["code"], found["stdout"], found["stderr"], folder)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


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


def start_train(
    overrides: list[str], cwd: Path, folder: Path, outputs: Path | None = None
) -> Started:
    """Start it in `cwd`, a new interpreter."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *with_places(overrides, folder, outputs)],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    return Started(process, folder)
