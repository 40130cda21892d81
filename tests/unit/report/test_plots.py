import subprocess
import sys

import numpy as np
import torch
from PIL import Image

from memtrain.report import formats, plots, tables
from memtrain.units import GIB

SUMMARIES = [
    {
        "status": "ok",
        "overrides": ["tag=$a$"],
        "peak_allocated_bytes": 2 * GIB,
        "predicted_peak_allocated_bytes": GIB,
        "tokens_per_second": 100.0,
    },
    {"status": "out_of_memory", "overrides": ["tag=b"]},
]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_sweep_figure(tmp_path):
    fig = plots.sweep_figure(tables.sweep_rows(SUMMARIES))
    memory, speed = fig.axes
    assert [bar.get_width() for bar in memory.patches] == [2.0, 0.0]
    assert texts(memory) == ["2.00 GiB", "out_of_memory"]
    assert texts(speed) == ["100", "out_of_memory"]
    assert memory.get_xlabel() == "peak memory (device), GiB"
    assert speed.get_xlabel() == "tokens per second"
    assert [label.get_text() for label in memory.get_yticklabels()] == ["tag=$a$", "tag=b"]
    assert memory.get_legend_handles_labels()[1] == ["predicted"]
    plots.save_png(fig, tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.width > 1000


def test_sweep_without_speed_has_one_plot():
    plan = {**SUMMARIES[0], "task": "plan", "tokens_per_second": None, "device_total_bytes": GIB}
    fig = plots.sweep_figure(tables.sweep_rows([plan]))
    (memory,) = fig.axes
    assert memory.get_xlabel() == "peak memory (predicted), GiB"
    assert memory.get_legend_handles_labels()[1] == ["device total"]


def test_a_prediction_for_the_device_is_not_drawn_beside_host_memory():
    host = {**SUMMARIES[0], "peak_allocated_bytes": None, "host_peak_rss_bytes": GIB}
    memory = plots.sweep_figure(tables.sweep_rows([host])).axes[0]
    assert memory.get_xlabel() == "peak memory (host RSS), GiB"
    assert memory.get_legend_handles_labels()[1] == []


def make_timeline(n_events: int, n_categories: int = 3) -> dict:
    size_bytes = np.full((n_events, n_categories), GIB)
    size_bytes[n_events // 3, 0] = 5 * GIB
    phase = ["forward"] * (n_events // 2) + ["backward"] * (n_events - n_events // 2)
    return {
        "categories": [f"c{index}" for index in range(n_categories)],
        "bytes": size_bytes.tolist(),
        "phase": phase,
    }


def test_timeline_figure(tmp_path):
    fig = plots.timeline_figure(make_timeline(60), 10 * GIB, "a step")
    (ax,) = fig.axes
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["c0", "c1", "c2", "peak 7.00 GiB", "capacity 10.00 GiB"]
    assert texts(ax) == ["forward", "backward"]
    assert ax.get_ylabel() == "allocated, GiB"
    plots.save_png(fig, tmp_path / "timeline.png")


def test_a_long_timeline_is_thinned_and_keeps_its_peak():
    total = np.ones(123_457)
    total[77_777] = 2
    kept = plots.thin(total)
    assert len(kept) == plots.MAX_POINTS
    assert 77_777 in kept
    assert (np.diff(kept) > 0).all()


def test_more_categories_than_colours_are_told_apart():
    fig = plots.timeline_figure(make_timeline(30, n_categories=12))
    looks = {(str(a.get_facecolor()), a.get_hatch()) for a in fig.axes[0].collections}
    assert len(looks) == 12


def test_phase_spans():
    spans = list(plots.phase_spans(["f", "f", "b", "f"]))
    assert spans == [("f", 0, 2), ("b", 2, 3), ("f", 3, 4)]


def test_gradient_histogram_figure(tmp_path):
    grads = {"mlp": torch.tensor([2.0**-40, 1.0]), "norm": torch.zeros(2)}
    histograms = formats.gradient_histograms(grads)
    fig = plots.gradient_histogram_figure(histograms, formats.float_formats())
    upper, lower = fig.axes
    assert upper.get_legend_handles_labels()[1] == ["mlp", "norm"]
    low, high = upper.get_xlim()
    assert low <= -40
    assert high >= 16
    assert [label.get_text() for label in lower.get_yticklabels()][2] == "fp16"
    plots.save_png(fig, tmp_path / "histogram.png")


def test_pyplot_is_never_imported():
    code = "import sys, memtrain.report.plots; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
