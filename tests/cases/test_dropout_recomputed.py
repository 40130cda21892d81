"""Recomputing draws the same dropout: gradients are equal to the last bit."""

from collections.abc import Callable

import pytest
from workbench import Workbench

from memtrain.config import Config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_the_largest_difference_is_nought(
    tiny: Callable[..., Config], bench: Workbench, precision: str, micro_batch: int
) -> None:
    window = bench.window(bench.samples(), micro_batch)
    base = [f"precision={precision}", "model.dropout=0.5"]
    kept = bench.gradients(bench.step(tiny(*base, "checkpoint_every=0")), window)
    again = bench.gradients(bench.step(tiny(*base, "checkpoint_every=1")), window)
    assert max((kept[name] - again[name]).abs().max().item() for name in kept) == 0.0
