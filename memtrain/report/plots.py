"""Figures of a sweep, of a step's memory and of gradients; no pyplot, so no global state."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from memtrain.units import format_bytes, format_count, gib

if TYPE_CHECKING:  # a sweep's table needs no torch
    from memtrain.report.formats import FloatFormat, GradientHistogram

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
"""Okabe and Ito's colours, told apart with every common kind of colour blindness."""
HATCHES = ("", "///", "...", "xxx")
"""For what comes after the last colour."""
MAX_POINTS = 2000
"""More events than this cannot be seen on a figure."""


def sweep_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Peak memory and tokens/s side by side, one bar per row of `tables.sweep_rows`."""
    keys = ["peak_bytes"] + ["tokens_per_second"] * any(row["tokens_per_second"] for row in rows)
    fig = Figure(figsize=(5 + 4 * len(keys), 1.4 + 0.42 * max(len(rows), 2)), layout="constrained")
    axes = fig.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for ax, key, color in zip(axes, keys, PALETTE, strict=False):
        draw_bars(ax, rows, key, color)
    source = next((row["peak_source"] for row in rows if row["peak_source"]), "not measured")
    if source != "host RSS":  # the marks are sizes on the device
        draw_marks(axes[0], rows, "predicted_bytes", "D", "predicted")
        draw_marks(axes[0], rows, "device_total_bytes", "|", "device total")
    axes[0].set_xlabel(f"peak memory ({source}), GiB")
    axes[-1].set_xlabel("tokens per second" if len(keys) > 1 else axes[0].get_xlabel())
    axes[0].set_yticks(range(len(rows)), [row["strategy"] for row in rows], parse_math=False)
    axes[0].invert_yaxis()
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return fig


def draw_bars(ax: Axes, rows: Sequence[Mapping[str, Any]], key: str, color: str) -> None:
    """One bar per row with its value at the end; a row without one shows its status instead."""
    in_bytes = key == "peak_bytes"
    sizes = [gib(row[key] or 0) if in_bytes else row[key] or 0 for row in rows]
    bars = ax.barh(range(len(rows)), sizes, color=color, height=0.65)
    show = format_bytes if in_bytes else format_count
    labels = [show(row[key]) if row[key] else row["status"] for row in rows]
    ax.bar_label(bars, labels, padding=8, fontsize=9, parse_math=False)
    ax.margins(x=0.22)
    style_axes(ax, "x")


def draw_marks(
    ax: Axes, rows: Sequence[Mapping[str, Any]], key: str, marker: str, label: str
) -> None:
    points = [(gib(row[key]), index) for index, row in enumerate(rows) if row[key]]
    if points:
        x, y = zip(*points, strict=True)
        ax.scatter(x, y, marker=marker, s=40 if marker == "D" else 260, c="#000000", label=label)


def timeline_figure(
    timeline: Mapping[str, Any], capacity_bytes: int | None = None, title: str = ""
) -> Figure:
    """Bytes by category, stacked, over the events of a step, with its phases and the capacity.

    `timeline`: `categories` (C names), `bytes` (N, C), `phase` (N names).
    """
    size_gib = gib(1) * np.asarray(timeline["bytes"], dtype=np.float64)  # (N, C)
    events = thin(size_gib.sum(axis=1))
    fig = Figure(figsize=(11, 5), layout="constrained")
    ax = fig.subplots()
    draw_phases(ax, timeline["phase"])
    areas = ax.stackplot(events, size_gib[events].T, labels=timeline["categories"], zorder=2)
    for index, area in enumerate(areas):
        area.set(facecolor=PALETTE[index % len(PALETTE)], edgecolor="white", linewidth=0)
        area.set_hatch(HATCHES[index // len(PALETTE) % len(HATCHES)])
    draw_peak(ax, size_gib.sum(axis=1))
    if capacity_bytes:
        capacity = f"capacity {format_bytes(capacity_bytes)}"
        ax.axhline(gib(capacity_bytes), color="black", linestyle="--", zorder=3, label=capacity)
    ax.set_title(title, parse_math=False)
    ax.set_xlabel("allocation event")
    ax.set_ylabel("allocated, GiB")
    ax.set_xlim(0, max(len(size_gib) - 1, 1))
    ax.set_ylim(bottom=0)
    ax.margins(y=0.12)
    style_axes(ax, "y")
    fig.legend(*stack_order(ax), loc="outside right upper", frameon=False)
    return fig


def thin(total: NDArray[np.float64]) -> NDArray[np.int64]:
    """At most MAX_POINTS indices of `total` (N,): the largest of each stretch keeps the peak."""
    stretches = np.array_split(np.arange(len(total)), min(MAX_POINTS, max(len(total), 1)))
    return np.array([part[total[part].argmax()] for part in stretches if len(part)], dtype=np.int64)


def phase_spans(phases: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(name, first event, first event after it) of each run of equal names."""
    start = 0
    for name, group in groupby(phases):
        stop = start + sum(1 for _ in group)
        yield name, start, stop
        start = stop


def draw_phases(ax: Axes, phases: Sequence[str]) -> None:
    """Shade every other phase; name those wide enough to hold their name."""
    for index, (name, start, stop) in enumerate(phase_spans(phases)):
        ax.axvspan(start, stop, color="#DDE3EA" if index % 2 else "#F3F5F8", lw=0, zorder=0)
        if (stop - start) / len(phases) > 0.011 * len(name):
            x, top = (start + stop) / 2, ax.get_xaxis_transform()
            ax.text(x, 0.985, name, transform=top, ha="center", va="top", fontsize=9, zorder=4)


def draw_peak(ax: Axes, total_gib: NDArray[np.float64]) -> None:
    """Mark the largest sum. (N,)"""
    if not len(total_gib):
        return
    event = int(total_gib.argmax())
    peak = f"peak {format_bytes(total_gib[event] / gib(1))}"
    ax.plot(event, total_gib[event], "v", color="black", markersize=7, zorder=5, label=peak)


def stack_order(ax: Axes) -> tuple[list[Any], list[str]]:
    """Legend entries from top to bottom as the areas lie."""
    handles, labels = ax.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def gradient_histogram_figure(
    histograms: Mapping[str, "GradientHistogram"], formats: Sequence["FloatFormat"]
) -> Figure:
    """Size of the gradients by kind of layer, above what each format can hold."""
    fig = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for index, (kind, histogram) in enumerate(histograms.items()):
        share = 100 * histogram.counts / max(int(histogram.counts.sum()), 1)
        upper.stairs(
            share, histogram.edges, color=PALETTE[index % len(PALETTE)], lw=1.8, label=kind
        )
    upper.set_ylabel("share of the non-zero\ngradients of this kind, %")
    upper.set_ylim(bottom=0)
    upper.legend(frameon=False)
    style_axes(upper, "y")
    draw_formats(lower, formats)
    lower.set_xlim(*visible_range(histograms))
    lower.set_xlabel("|gradient|, power of two")
    return fig


def draw_formats(ax: Axes, formats: Sequence["FloatFormat"]) -> None:
    """A bar from the smallest to the largest number of each format, paler where subnormal."""
    for index, form in enumerate(formats):
        tiny, normal, largest = map(
            math.log2, (form.smallest_subnormal, form.smallest_normal, form.largest)
        )
        ax.barh(index, normal - tiny, left=tiny, color="#A6CBE3", height=0.6)
        ax.barh(index, largest - normal, left=normal, color=PALETTE[0], height=0.6)
    ax.barh(0, 0, color=PALETTE[0], label="normal numbers")
    ax.barh(0, 0, color="#A6CBE3", label="subnormal: fewer digits")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2, frameon=False)
    ax.set_yticks(range(len(formats)), [form.name for form in formats])
    ax.invert_yaxis()
    style_axes(ax, "x")


def visible_range(histograms: Mapping[str, "GradientHistogram"]) -> tuple[float, float]:
    """From what the gradients need and at least fp16's range, with some air."""
    ends = [(-26.0, 18.0)]
    for histogram in histograms.values():
        used = np.flatnonzero(histogram.counts)
        if len(used):
            ends.append((histogram.edges[used[0]] - 2, histogram.edges[used[-1] + 1] + 2))
    lows, highs = zip(*ends, strict=True)
    return float(min(lows)), float(max(highs))


def style_axes(ax: Axes, grid: Literal["x", "y"]) -> None:
    ax.grid(axis=grid, color="#D0D0D0", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def save_png(fig: Figure, path: str | Path) -> None:
    """Write `fig` to `path`, 150 dots per inch."""
    fig.savefig(path, dpi=150, format="png")
