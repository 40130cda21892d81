"""The loss scale is out of the gradient before it is clipped."""

from collections.abc import Callable

import pytest
from workbench import Workbench

from memtrain.config import Config


def test_clipping_comes_after_unscaling(tiny: Callable[..., Config], bench: Workbench) -> None:
    """16 weights with gradient 3: norm 12 before clipping, update norm 1 after, whatever the scale."""
    step = bench.step(tiny("precision=fp16", "clip=1.0", "optimizer=sgd", "optimizer.momentum=0",
                           "optimizer.lr=1.0", "optimizer.weight_decay=0"))  # fmt: skip
    for parameter in step.model.parameters():
        parameter.requires_grad_(False)
    weight = step.model.norm.weight.requires_grad_()
    step.loss_function = lambda *arguments: weight.float()[:16].sum() * 3 * 512 * arguments[-1]
    batch = bench.samples(ragged=False)
    batch.n_targets = 512
    before = weight.detach().clone()
    _, norm, _ = step([batch]).tolist()
    assert norm == pytest.approx(12.0)
    assert (weight - before).norm().item() == pytest.approx(1.0, abs=1e-5)
