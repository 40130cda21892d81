"""TensorBoard: one event file per run, with the tags of TAGS and the HPARAMS of a sweep."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from memtrain.units import gib

if TYPE_CHECKING:  # only a run that draws pays for matplotlib
    from matplotlib.figure import Figure

FLUSH_S = 10
"""What a killed run can lose of its curves."""

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "tokens": "train/tokens",
    "padding_share": "train/padding_share",
    "tokens_per_second": "speed/tokens_per_second",
    "run_tokens_per_second": "speed/tokens_per_second_run",
    "mfu": "speed/mfu",
    "val_loss": "val/loss",
    "val_perplexity": "val/perplexity",
    "allocated_bytes": "memory/allocated_gib",
    "peak_allocated_bytes": "memory/peak_allocated_window_gib",
    "peak_reserved_bytes": "memory/peak_reserved_window_gib",
    "predicted_peak_allocated_bytes": "memory/predicted_peak_allocated_gib",
    "prediction_error_pct": "memory/prediction_error_pct",
    "peak_active_bytes": "memory/peak_active_window_gib",
    "run_peak_allocated_bytes": "memory/peak_allocated_run_gib",
    "run_peak_active_bytes": "memory/peak_active_run_gib",
    "run_peak_reserved_bytes": "memory/peak_reserved_run_gib",
    "alloc_retries": "memory/alloc_retries",
    "ooms": "memory/ooms",
    "host_rss_bytes": "memory/host_rss_gib",
    "host_peak_rss_bytes": "memory/host_peak_rss_gib",
}
"""Record key -> tag. Keys in `_bytes` are written in GiB; a window is since the last log step."""


METRIC_TAGS = {
    "final_loss": "train/loss",
    "val_loss": "val/loss",
    "tokens_per_second": "speed/tokens_per_second_run",
    "peak_allocated_bytes": "memory/peak_allocated_run_gib",
    "peak_reserved_bytes": "memory/peak_reserved_run_gib",
    "host_peak_rss_bytes": "memory/host_peak_rss_gib",
}
"""Key of the summary -> the curve whose last value the HPARAMS tab shows."""


class Board:
    """Writes a run's curves; `purge_step` hides what an interrupted run wrote from there on."""

    def __init__(self, run_dir: str | Path, purge_step: int | None = None) -> None:
        self.writer = SummaryWriter(str(run_dir), purge_step=purge_step, flush_secs=FLUSH_S)

    def scalars(self, record: Mapping[str, float | None], step: int) -> None:
        """Write what was measured (not None) of `record`; a NaN is written as NaN."""
        for key, value in record.items():
            if key == "step" or value is None:
                continue
            assert key in TAGS, f"no TensorBoard tag for {key!r}"
            self.writer.add_scalar(TAGS[key], in_unit(key, value), step)

    def text(self, tag: str, text: str) -> None:
        """Write Markdown."""
        self.writer.add_text(tag, text)

    def figure(self, tag: str, fig: "Figure") -> None:
        """Write `fig` as an image."""
        self.writer.add_image(tag, pixels(fig), dataformats="HWC")

    def hparams(self, hparams: Mapping[str, Any], metrics: Mapping[str, float | None]) -> None:
        """Write the row of this run in the HPARAMS tab; metrics are the last values of their curves.

        Not `SummaryWriter.add_hparams`: that makes a second run in a sub-folder.
        """
        values = {METRIC_TAGS[k]: in_unit(k, v) for k, v in metrics.items() if v is not None}
        plain = {key: plain_value(value) for key, value in hparams.items()}
        for summary in hparams_summaries(plain, values):  # type: ignore[no-untyped-call]
            self.writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Write what is queued and close the file."""
        self.writer.close()


def in_unit(key: str, value: float) -> float:
    return gib(value) if key.endswith("_bytes") else float(value)


def plain_value(value: Any) -> bool | float | str:
    """TensorBoard knows booleans, finite numbers and strings; all else is shown as text."""
    if isinstance(value, bool):
        return value
    number = isinstance(value, (int, float)) and math.isfinite(value)
    # A file's name may hold bytes that are no text.
    return float(value) if number else str(value).encode(errors="backslashreplace").decode()


def pixels(fig: "Figure") -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw `fig`. (H, W, 3)"""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    rgba: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(canvas.buffer_rgba(), dtype=np.uint8)
    return rgba[..., :3]
