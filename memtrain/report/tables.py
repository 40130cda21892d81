"""The comparison of a sweep, and bytes by category and phase: console, Markdown and CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from memtrain.units import format_bytes, format_count, format_seconds

Row = dict[str, Any]

PEAK_SOURCES = {
    "peak_allocated_bytes": "device",
    "host_peak_rss_bytes": "host RSS",
    "predicted_peak_allocated_bytes": "predicted",
}
"""Where a sweep's peak column comes from, best first: one source for all its rows."""


@dataclass(frozen=True)
class Column:
    """One column of the comparison; `{peak}` in the header is the source of the peak."""

    key: str
    header: str
    show: Callable[[Any], str] = str
    justify: str = "right"


COLUMNS = (
    Column("strategy", "strategy", justify="left"),
    Column("status", "status", justify="left"),
    Column("kept", "kept", lambda kept: "yes", justify="left"),
    Column("gpu", "GPU", justify="left"),
    Column("fits", "fits", lambda fits: "yes" if fits else "no", justify="left"),
    Column("peak_bytes", "peak memory ({peak})", format_bytes),
    Column("predicted_bytes", "predicted (device)", format_bytes),
    Column("relative_peak", "relative peak", "{:.2f}x".format),
    Column("device_total_bytes", "device total", format_bytes),
    Column("step_seconds", "step", format_seconds),
    Column("tokens_per_second", "tokens/s", format_count),
    Column("relative_speed", "relative speed", "{:.2f}x".format),
    Column("final_loss", "final loss", "{:.4f}".format),
    Column("val_loss", "val loss", "{:.4f}".format),
    Column("error", "error", justify="left"),
)


def sweep_rows(summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per job, in the order given; what is relative is so to the first row that is ok.

    A row has the keys of COLUMNS (None: not measured) and `peak_source`.
    """
    measured = [separate_prediction(summary) for summary in summaries]
    source = next((k for k in PEAK_SOURCES if any(s.get(k) for s in measured)), None)
    rows = [
        make_row(summary, strategy, source)
        for summary, strategy in zip(measured, strategies(measured), strict=True)
    ]
    add_relative(rows, "peak_bytes", "relative_peak")
    add_relative(rows, "tokens_per_second", "relative_speed")
    return rows


def separate_prediction(summary: Mapping[str, Any]) -> Row:
    """A plan's peak is a prediction: never let it stand in a column of measurements."""
    if summary.get("task") != "plan":
        return dict(summary)
    peak = summary.get("peak_allocated_bytes")
    return {**summary, "peak_allocated_bytes": None, "predicted_peak_allocated_bytes": peak}


def strategies(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each job from the others: the overrides that not all of them have."""
    overrides: list[list[str]] = [list(summary.get("overrides") or []) for summary in summaries]
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    varying = [[item for item in items if item not in common] for items in overrides]
    return [strategy_name(items) for items in varying]


def strategy_name(overrides: Sequence[str]) -> str:
    """`["experiment=x"] -> "x"`, else the overrides joined by spaces."""
    if len(overrides) == 1:
        return overrides[0].removeprefix("experiment=")
    return " ".join(overrides) or "base"


def make_row(summary: Mapping[str, Any], strategy: str, source: str | None) -> Row:
    row = {column.key: summary.get(column.key) for column in COLUMNS}
    error = (summary.get("error") or "").strip()
    predicted = summary.get("predicted_peak_allocated_bytes")
    return row | {
        "strategy": strategy,
        "error": error.splitlines()[0] if error else None,
        "peak_source": PEAK_SOURCES[source] if source else None,
        "peak_bytes": (summary.get(source) if source else None) or None,
        "predicted_bytes": predicted if source != "predicted_peak_allocated_bytes" else None,
    }


def add_relative(rows: list[Row], key: str, relative_key: str) -> None:
    base = next((row[key] for row in rows if row["status"] == "ok" and row[key]), None)
    for row in rows:
        row[relative_key] = row[key] / base if base and row[key] else None


def used_columns(rows: Sequence[Row]) -> list[Column]:
    return [column for column in COLUMNS if any(row[column.key] is not None for row in rows)]


def header(column: Column, rows: Sequence[Row]) -> str:
    return column.header.format(peak=rows[0]["peak_source"])


def cell(column: Column, row: Row) -> str:
    value = row[column.key]
    return "" if value is None else column.show(value)


def sweep_table(rows: Sequence[Row]) -> Table:
    """The comparison for the console."""
    table = Table(title=f"{len(rows)} jobs")
    columns = used_columns(rows)
    for column in columns:
        add_column(table, header(column, rows), column.justify)
    for row in rows:
        style = "" if row["status"] == "ok" else "red"
        table.add_row(*(Text(cell(column, row)) for column in columns), style=style)
    return table


def sweep_markdown(rows: Sequence[Row]) -> str:
    """The comparison as a Markdown table."""
    columns = used_columns(rows)
    lines = [[header(column, rows) for column in columns]]
    lines += [["---:" if column.justify == "right" else ":---" for column in columns]]
    lines += [[cell(column, row).replace("|", "\\|") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sweep_csv(rows: Sequence[Row]) -> str:
    """The comparison as CSV with unrounded values; `peak_bytes` says its source in its name."""
    columns = used_columns(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(csv_name(column, rows) for column in columns)
    writer.writerows([row[column.key] for column in columns] for row in rows)
    return text.getvalue()


def csv_name(column: Column, rows: Sequence[Row]) -> str:
    if column.key != "peak_bytes":
        return column.key
    return f"peak_{rows[0]['peak_source'].lower().replace(' ', '_')}_bytes"


def write_sweep(rows: Sequence[Row], sweep_dir: str | Path) -> None:
    """Write `sweep.md` and `sweep.csv` into `sweep_dir`."""
    for name, text in (("sweep.md", sweep_markdown(rows)), ("sweep.csv", sweep_csv(rows))):
        with (Path(sweep_dir) / name).open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)


def category_table(phases: Mapping[str, Mapping[str, int]], title: str = "") -> Table:
    """Bytes by category (rows) and phase (columns), with their sum; empty categories left out."""
    table = Table(title=title or None)
    for name in ("", *phases):
        add_column(table, name, "right" if name else "left")
    for category in categories(phases.values()):
        sizes = [sizes_bytes.get(category, 0) for sizes_bytes in phases.values()]
        table.add_row(Text(category), *(format_bytes(size) if size else "-" for size in sizes))
    table.add_section()
    totals = (format_bytes(sum(sizes_bytes.values())) for sizes_bytes in phases.values())
    table.add_row("total", *totals, style="bold")
    return table


def categories(phases: Iterable[Mapping[str, int]]) -> list[str]:
    """Those that have a byte, in the order in which a phase names them, the fullest phase first."""
    fullest = sorted(phases, key=len, reverse=True)
    return list(dict.fromkeys(name for sizes in fullest for name, size in sizes.items() if size))


def add_column(table: Table, name: str, justify: str) -> None:
    table.add_column(Text(name), justify="right" if justify == "right" else "left")


def changes_table(changes: Iterable[tuple[str, Any, Any]]) -> Table:
    """What a resumed run does otherwise: key, then, now."""
    table = Table(title="changed")
    for column in ("key", "then", "now"):
        table.add_column(column)
    for key, then, now in changes:
        table.add_row(key, str(then), str(now))
    return table
