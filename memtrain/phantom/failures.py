"""What goes wrong on the phantom, and when it is raised."""

from __future__ import annotations

import torch


class UnsupportedOperator(RuntimeError):
    """An operator that cannot run without data, or for which torch has no shape function."""


class RaceError(RuntimeError):
    """Memory is read, written or given away that another stream may not be done with."""


class Failures:
    """Raises errors at once; inside backward, the first of them when it has returned.

    torch's engine cannot unwind through a device that was registered from Python: it ends the process.
    """

    def __init__(self) -> None:
        self._kept: Exception | None = None

    def fail(self, error: Exception) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise error
        self._kept = self._kept or error

    def raise_kept(self) -> None:
        error, self._kept = self._kept, None
        if error is not None:
            raise error
