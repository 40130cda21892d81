"""What a run leaves behind: metrics.jsonl, TensorBoard events and the figures of the summary."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memtrain.report.board import TAGS, Board
from memtrain.report.console import perplexity
from memtrain.run_folder import METRICS, finite, write_text

PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


class Recorder:
    """Takes the loop's records, one per logged step, and writes each everywhere."""

    def __init__(
        self,
        folder: Path,
        show: Callable[[dict[str, Any]], None],
        peak_flops: float,
        token_flops: int,
        resumed_step: int | None = None,
        predicted_peak_bytes: int | None = None,
    ) -> None:
        """`peak_flops` of the device for the compute type, 0 if not known; `token_flops` of the model.
        `predicted_peak_bytes` of the device; None: not planned.

        With `resumed_step` what an earlier process wrote of later steps is taken out: each step is there once.
        """
        self.board = Board(folder, None if resumed_step is None else resumed_step + 1)
        self.summary: dict[str, Any] = {}
        self._show, self._peak_flops, self._token_flops = show, peak_flops, token_flops
        self._predicted_bytes = predicted_peak_bytes
        self._seconds_s = self._tokens = 0.0
        if resumed_step is not None:
            records = records_until(folder / METRICS, resumed_step)
            for record in records:
                self._summarise(record)
            write_text(folder / METRICS, "".join(f"{json.dumps(r)}\n" for r in records))
        self._metrics = (folder / METRICS).open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._metrics.close()
        self.board.close()

    def __call__(self, record: dict[str, Any]) -> None:
        record = self._extend(record)
        self._summarise(record)
        record["run_tokens_per_second"] = self.summary["tokens_per_second"]
        self._metrics.write(json.dumps(finite(record)) + "\n")
        self.board.scalars({k: v for k, v in record.items() if k in TAGS}, record["step"])
        self._show(record)

    def flush(self) -> None:
        """What was recorded is in the files: a checkpoint of this step may follow."""
        self.board.writer.flush()

    def _extend(self, record: dict[str, Any]) -> dict[str, Any]:
        """With what follows from it: perplexity, utilisation, peaks of the run so far, beside the predicted one."""
        record = dict(record)
        if "val_loss" in record:
            record["val_perplexity"] = perplexity(record["val_loss"])
        if self._peak_flops:
            record["mfu"] = record["tokens_per_second"] * self._token_flops / self._peak_flops
        for key in PEAKS:
            if key in record:
                record[f"run_{key}"] = max(record[key], self.summary.get(key) or 0)
        if self._predicted_bytes:
            record["predicted_peak_allocated_bytes"] = self._predicted_bytes
            if measured_bytes := record.get("run_peak_allocated_bytes"):
                record["prediction_error_pct"] = 100 * (self._predicted_bytes / measured_bytes - 1)
        return record

    def _summarise(self, record: Mapping[str, Any]) -> None:
        summary = self.summary
        summary.setdefault("first_loss", finite(record["loss"]))
        loss = finite(record.get("last_loss", record["loss"]))
        summary |= {
            "final_loss": summary.get("final_loss") if loss is None else loss,
            "val_loss": record.get("val_loss", summary.get("val_loss")),
            "steps": record["step"],
            "skipped_steps": record["skipped_steps"],
            "tokens": record.get("tokens"),
            "padding_tokens": record.get("padding_tokens"),
            "host_peak_rss_bytes": record["host_peak_rss_bytes"],
        }
        for key in PEAKS:
            summary[key] = record.get(f"run_{key}")
        if "prediction_error_pct" in record:
            summary["prediction_error_pct"] = record["prediction_error_pct"]
        if record["step"] > 1:  # the first step pays for what is set up on first use
            self._seconds_s += record["interval_s"]
            self._tokens += record["tokens_per_second"] * record["interval_s"]
        rate = self._tokens / self._seconds_s if self._seconds_s else record["tokens_per_second"]
        summary["tokens_per_second"] = rate
        if self._peak_flops:
            summary["mfu"] = rate * self._token_flops / self._peak_flops


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The records of a metrics file up to `step`; a line that a kill cut off is none."""
    records = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("step", step + 1) <= step:
            records.append(record)
    return records
