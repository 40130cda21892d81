"""Ctrl-C, SIGTERM and a lost terminal: the first asks the run to end after this window, the second ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from memtrain.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While it is entered, `requested` says whether one of the signals has come.

    The first shows `notice`; `pass_on` hears of each.
    """

    def __init__(self, notice: str, pass_on: Callable[[int], None] = lambda number: None) -> None:
        self._notice, self._pass_on = notice, pass_on
        self.requested: int = 0
        """The signal's number."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            heard = [n for n in SIGNALS if n != signal.SIGHUP or not is_ignored(n)]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pass_on(number)
        if self.requested:
            os._exit(128 + number)  # whatever hangs shall not hold it up
        self.requested = number
        # os.write: the handler may have interrupted a print.
        os.write(sys.stderr.fileno(), f"\n{self._notice}; once more: at once\n".encode())

    def raise_if_requested(self, where: str) -> None:
        """Raises Stopped with the exit code of the signal."""
        if self.requested:
            raise Stopped(
                128 + self.requested, f"stopped, saved at {where}; go on with resume=latest"
            )


def is_ignored(number: int) -> bool:
    """As `nohup` asks for."""
    return signal.getsignal(number) == signal.SIG_IGN
