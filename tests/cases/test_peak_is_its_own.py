"""A job's peak is its own: each is a process, and what cannot be measured is null, not 0."""

import json
from collections.abc import Callable

import pytest
import torch
from command import Finished, Run
from workbench import Workbench

from memtrain.config import Config


def test_on_the_cpu_device_peaks_are_null(straight: Finished) -> None:
    summary = json.loads((straight.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["peak_allocated_bytes"] is None and summary["peak_reserved_bytes"] is None
    metrics = (straight.folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert "allocated" not in metrics and "reserved" not in metrics
    assert summary["host_peak_rss_bytes"] > 2**26


@pytest.mark.slow
def test_a_job_of_a_sweep_is_the_run_by_itself(run: Run) -> None:
    """The second job of two has the losses and the memory of the only one."""
    found = []
    for values, job in (("4,1", 1), ("1", 0)):
        folder = run("-m", f"micro_batch={values}", "debug=tiny").folder / str(job)
        found.append(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    assert found[0]["final_loss"] == found[1]["final_loss"]
    assert found[0]["host_peak_rss_bytes"] == pytest.approx(
        found[1]["host_peak_rss_bytes"], rel=0.05
    )


@pytest.mark.gpu
def test_peaks_start_anew(config: Callable[..., Config], bench: Workbench) -> None:
    """A large step before leaves no trace in the peak of a small one."""
    from memtrain.device import allocator_statistics, reset_peaks

    cuda = torch.device("cuda")
    peaks = []
    for elements in (2**26, 2**20):
        reset_peaks(cuda)
        torch.ones(elements, device=cuda)
        peaks.append(allocator_statistics(cuda)["peak_allocated_bytes"])
    assert peaks[1] < peaks[0] / 10
