"""Ctrl-C, SIGTERM and a lost terminal, by what a process has to lose.

While it imports, nothing: `exit_on_signals`. While it prepares, a folder and a file: `raise_on_signals`. While it
trains, the run: StopRequest; the first asks it to end after this window, the second ends it at once.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from memtrain.errors import Stopped

ASK = signal.SIGUSR1
"""Asks as SIGTERM does, but once, however often it comes: so a sweep asks its job, which may have heard before."""


def heard() -> list[signal.Signals]:
    """The signals that end a process; not a lost terminal's where that is ignored, as `nohup` has it."""
    found = [signal.SIGINT, signal.SIGTERM, ASK]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


def exit_code(number: int) -> int:
    return 128 + (signal.SIGTERM if number == ASK else number)


def shout(text: str) -> None:
    """From a handler, which may have interrupted a print."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def exit_on_signals() -> None:
    """At once: an exception in the midst of an import may be swallowed, or leave half of a module."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        shout("interrupted")
        os._exit(exit_code(number))

    for number in heard():
        signal.signal(number, end)


def raise_on_signals() -> None:
    """SystemExit, for whoever has something to put away."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(ASK, signal.SIG_IGN)
        sys.exit(exit_code(number))

    for number in heard():
        signal.signal(number, end)


def leave_signals() -> None:
    """To the process that asks this one, a launcher's worker, in other ways: a terminal signals both.

    Handlers that the launcher has set stay, and the processes started here begin without these.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in heard():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda number, frame: None)


class _Lasting(io.FileIO):
    """Takes what is written after the terminal, or who reads the pipe, is gone, or the disk of the log is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Nobody left to read stdout and stderr is no reason to end a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # None: closed from the beginning
        fd = os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_Lasting(fd, "w", closefd=False)),
            getattr(stream, "encoding", "utf-8"),
            getattr(stream, "errors", "replace"),
            line_buffering=getattr(stream, "line_buffering", True),
        )
        setattr(sys, name, lasting)


class StopRequest:
    """While it is entered, `requested` says whether one of the signals has come.

    The first shows `notice`; a second one, other than ASK, does not return. `pass_on` is told what another process is
    to hear then: ASK, SIGKILL.
    """

    def __init__(self, notice: str, pass_on: Callable[[int], None] = lambda number: None) -> None:
        self._notice, self._pass_on = notice, pass_on
        self.requested: int = 0
        """The signal's number."""
        self._heard = False
        """One that was not ASK."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._on_signal) for number in heard()}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.requested and self._before:
            signal.signal(ASK, signal.SIG_IGN)  # what is put away now was asked for already

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._heard and number != ASK:
            self._pass_on(signal.SIGKILL)
            os._exit(exit_code(number))  # whatever hangs shall not hold it up
        self._heard |= number != ASK
        if not self.requested:
            self.requested = number
            self._pass_on(ASK)
            shout(f"\n{self._notice}; once more: at once")

    def raise_if_requested(self, what: str) -> None:
        """Raises Stopped, which says `what`, with the exit code of the signal."""
        if self.requested:
            raise Stopped(exit_code(self.requested), what)
