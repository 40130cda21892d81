"""What a run says: a live bar on a terminal, plain lines in a file, one screen at the end."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console, RenderableType
from rich.text import Text

from memtrain.errors import print_error as print_error
from memtrain.errors import print_warning as print_warning
from memtrain.units import format_bytes, format_count, format_seconds, gib

log = logging.getLogger("memtrain")
"""What is said is kept in the run's train.log, too, with the time."""

FIELDS: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {loss:.3f}",
    "val_loss": lambda loss: f"val {loss:.3f}",
    "tokens_per_second": lambda rate: f"{format_count(rate)} tok/s",
    "padding_share": lambda share: f"padding {share:.1%}",
    "lr": lambda lr: f"lr {lr:.1e}",
    "grad_norm": lambda norm: f"norm {norm:.2f}",
    "peak_allocated_bytes": lambda size_bytes: f"peak {gib(size_bytes):.2f} GiB",
    "host_rss_bytes": lambda size_bytes: f"host {gib(size_bytes):.2f} GiB",
    "skipped_steps": lambda count: f"skipped {count:.0f}",
}
LIVE_FIELDS = ("loss", "tokens_per_second", "peak_allocated_bytes", "host_rss_bytes")
SILENT_AT_ZERO = ("peak_allocated_bytes", "host_rss_bytes", "skipped_steps")
SPEED_WINDOW_S = 3600.0
"""Time left is estimated over this long: log steps may be minutes apart."""


TASK_COLUMNS = (
    bars.TextColumn("{task.description}", markup=False),
    bars.BarColumn(),
    bars.DownloadColumn(binary_units=True),
    bars.TimeRemainingColumn(),
)


def is_plain() -> bool:
    """Whether stdout is a file, a pipe or a terminal that cannot move its cursor."""
    return not sys.stdout.isatty() or Console().is_dumb_terminal


def format_record(record: Mapping[str, float | None], keys: Iterable[str] = FIELDS) -> str:
    """`loss 5.123 · 8.1k tok/s`: the fields of one logged step that were measured."""
    values = ((key, record.get(key)) for key in keys)
    return " · ".join(
        FIELDS[key](value)
        for key, value in values
        if value is not None and not (value == 0 and key in SILENT_AT_ZERO)
    )


class Progress:
    """Shows a run's steps: a live bar on a terminal, one line per logged step otherwise."""

    def __init__(self, total_steps: int, plain: bool | None = None, first_step: int = 0) -> None:
        self.total_steps = total_steps
        self.plain = is_plain() if plain is None else plain
        self.bar = bars.Progress(
            bars.TextColumn("step"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.description}", markup=False),
            bars.TimeRemainingColumn(),
            speed_estimate_period=SPEED_WINDOW_S,
            disable=self.plain,
        )
        self.task = self.bar.add_task("", total=total_steps, completed=first_step)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def update(self, record: Mapping[str, float | None]) -> None:
        """Show one logged step: `step`, and any of FIELDS (absent or None: not measured)."""
        step = record["step"]
        assert step is not None
        if self.plain:
            say(f"step {step:.0f}/{self.total_steps} · {format_record(record)}")
        else:
            log.info(f"step {step:.0f}/{self.total_steps} · {format_record(record)}")
            shown = format_record(record, LIVE_FIELDS)
            self.bar.update(self.task, completed=step, description=shown)


@contextmanager
def task_progress(title: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Progress over `total` bytes, by calls of the yielded `callback(done, total)`.

    Without a call nothing is shown: the work was done before.
    """
    start_s, live, used = time.monotonic(), not is_plain(), False
    with bars.Progress(*TASK_COLUMNS, transient=True, disable=not live) as bar:
        task = bar.add_task(title, total=total, visible=False)

        def callback(done: int, total: int) -> None:
            nonlocal used
            if not used and not live:
                say(f"{title}: {format_bytes(total)}")
            used = True
            bar.update(task, completed=done, total=total, visible=True)

        yield callback
    if used:
        say(f"{title}: done in {format_seconds(time.monotonic() - start_s)}")


def print_header(config_lines: Iterable[str]) -> None:
    """The lines that say what is about to run."""
    for line in config_lines:
        say(line)


def print_verdict(text: str, good: bool) -> None:
    """The one line that says whether it fits."""
    say(text, style="bold green" if good else "bold red")


def print_table(table: RenderableType) -> None:
    """A rich table to stdout; in a file it is as wide as it needs, never folded to 80 columns."""
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def print_summary(summary: Mapping[str, Any]) -> None:
    """The one screen at the end of a run, peak memory first.

    Keys, each optional (absent or None: not measured): `peak_allocated_bytes`, `peak_reserved_bytes`,
    `host_peak_rss_bytes`, `predicted_peak_allocated_bytes`, `optimizer_bytes_per_parameter`, `optimizer_share_32_bit`
    (0..1), `first_loss`, `final_loss`, `vocab_size`, `unigram_entropy` (nats), `val_loss`, `tokens_per_second`, `mfu`
    (0..1), `tokens`, `padding_tokens`, `skipped_steps`, `skipped_in_a_row` (at the end), `run_dir`, `sample` (text).
    """
    say("")
    for label, value in summary_lines(summary):
        text = value.replace("\n", f"\n{'':14}")
        say(f"{label:<13} {text}", style="bold green" if label == "peak memory" else "")


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of everything in `summary` that was measured."""
    lines = {
        "peak memory": peak_text(summary),
        "predicted": predicted_text(summary),
        "host memory": host_text(summary),
        "optimizer": optimizer_text(summary),
        "loss": loss_text(summary),
        "validation": validation_text(summary),
        "speed": speed_text(summary),
        "skipped": skipped_text(summary),
        "run folder": str(summary.get("run_dir") or ""),
        "sample": printable(summary.get("sample") or ""),
    }
    return [(label, text) for label, text in lines.items() if text]


def optimizer_text(summary: Mapping[str, Any]) -> str:
    size, share = (
        summary.get(f"optimizer_{name}") for name in ("bytes_per_parameter", "share_32_bit")
    )
    if size is None:
        return ""
    kept = f", {share:.1%} of the parameters keep 32 bits (small tensors)" if share else ""
    return f"{size:.2f} bytes of state per parameter{kept}"


def peak_text(summary: Mapping[str, Any]) -> str:
    measured = {
        "allocated": summary.get("peak_allocated_bytes"),
        "reserved": summary.get("peak_reserved_bytes"),
    }
    parts = [f"{format_bytes(size)} {kind}" for kind, size in measured.items() if size]
    if parts:
        return " · ".join(parts)
    host = summary.get("host_peak_rss_bytes")
    return f"{format_bytes(host)} host RSS (no device memory to measure)" if host else ""


def predicted_text(summary: Mapping[str, Any]) -> str:
    predicted = summary.get("predicted_peak_allocated_bytes")
    if not predicted:
        return ""
    card = summary.get("planned_gpu")
    measured = summary.get("peak_allocated_bytes")
    error = f" ({predicted / measured - 1:+.1%} against measured)" if measured else ""
    return f"{format_bytes(predicted)} allocated{f' on {card}' if card else ''}{error}"


def host_text(summary: Mapping[str, Any]) -> str:
    """Only beside a device peak: without one the host's is the first line."""
    host = summary.get("host_peak_rss_bytes")
    return f"{format_bytes(host)} peak RSS" if host and summary.get("peak_allocated_bytes") else ""


def loss_text(summary: Mapping[str, Any]) -> str:
    """`9.011 -> 4.530 (ln(8192) = 9.011 · unigram entropy 6.900)`, in nats per token."""
    losses = [summary.get("first_loss"), summary.get("final_loss")]
    shown = " -> ".join(f"{loss:.3f}" for loss in losses if loss is not None)
    vocab_size, entropy = summary.get("vocab_size"), summary.get("unigram_entropy")
    marks = [f"ln({vocab_size}) = {math.log(vocab_size):.3f}"] if vocab_size else []
    marks += [f"unigram entropy {entropy:.3f}"] if entropy is not None else []
    return f"{shown} ({' · '.join(marks)})" if shown and marks else shown


def validation_text(summary: Mapping[str, Any]) -> str:
    loss = summary.get("val_loss")
    return "" if loss is None else f"loss {loss:.3f} · perplexity {perplexity(loss):.4g}"


def speed_text(summary: Mapping[str, Any]) -> str:
    rate, mfu = summary.get("tokens_per_second"), summary.get("mfu")
    tokens, padding = summary.get("tokens"), summary.get("padding_tokens")
    parts = [f"{format_count(rate)} tok/s"] if rate else []
    parts += [f"padding {padding / (tokens + padding):.1%}"] if tokens and padding else []
    parts += [f"MFU {mfu:.1%}"] if mfu else []
    return " · ".join(parts)


def skipped_text(summary: Mapping[str, Any]) -> str:
    count, at_the_end = summary.get("skipped_steps"), summary.get("skipped_in_a_row")
    if not count:
        return ""
    return f"{count} steps" + (
        f", the last {at_the_end} of the run among them" if at_the_end else ""
    )


def perplexity(loss: float) -> float:
    """exp(loss in nats); inf where that leaves the range of a float."""
    return math.inf if loss > 700 else math.exp(loss)


def printable(text: str) -> str:
    """A model may emit any character: those that would steer the terminal become U+FFFD."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def say(text: str, style: str = "") -> None:
    """One line to stdout, never folded; characters the stream cannot encode become `?`."""
    if text:
        log.info(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    encodable = text.encode(encoding, "replace").decode(encoding)
    Console(highlight=False).print(Text(encodable, style), soft_wrap=True)
    sys.stdout.flush()
