"""Gradients are unscaled and clipped once per window, however many micro-batches it has."""

from collections.abc import Callable

import pytest
from workbench import Workbench

from memtrain.config import Config


def test_unscaled_and_clipped_once_per_window(
    tiny: Callable[..., Config], bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = bench.step(tiny("precision=fp16", "clip=1.0"))
    calls = []
    unscale = step.scaler.unscale_
    monkeypatch.setattr(step.scaler, "unscale_", lambda o: (calls.append(1), unscale(o)))
    for number in range(3):
        step(bench.window(bench.samples(seed=number), 2))
    assert len(calls) == 3
