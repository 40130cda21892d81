"""Sweeps: every job is a fresh process, a failing job is a row, the table comes at the end."""

from memtrain.sweep.jobs import run_job, typed
from memtrain.sweep.table import SweepTable, end_if_stopped

__all__ = ["SweepTable", "end_if_stopped", "run_job", "typed"]
