"""What a program is told that reads a value from a tensor without data."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from memtrain.phantom.failures import UnsupportedOperator
from memtrain.phantom.modules import ModuleWatch
from memtrain.phantom.races import Races
from memtrain.phantom.streams import HOST, Schedule, merge

VALUES_PER_STEP = 10_000


@dataclass(eq=False)
class Values:
    """Zeros, and an end to a program that reads too many of them."""

    device_type: str
    schedule: Schedule
    watch: ModuleWatch
    races: Races
    n_read: int = 0
    """Since the last backward or optimizer step."""

    def item(self, t: Any) -> Any:
        self._count(t)
        if t.fake_device.type == self.device_type:
            merge(self.schedule.host, self.schedule.current.clock)
        elif self.schedule.tracking:
            self.races.check_read(t, HOST, "item")
        if t.dtype.is_complex:
            return 0j
        if t.dtype == torch.bool:
            warnings.warn(
                f"a truth value was read{self.watch.where} from a tensor without data: it is False, "
                "and the program goes on as it would then",
                stacklevel=4,  # the program's line, which called __torch_dispatch__
            )
            return False
        return 0.0 if t.dtype.is_floating_point else 0

    def _count(self, t: Any) -> None:
        """A program that reads on and on loops on a value that never comes; a bool decides more."""
        self.n_read += 10 if t.dtype == torch.bool else 1
        if self.n_read > VALUES_PER_STEP:
            raise UnsupportedOperator(
                f"too many values were read{self.watch.where} (`.item()`) with no backward or optimizer "
                "step in between: every one is 0, and a loop that waits for another never ends"
            )
