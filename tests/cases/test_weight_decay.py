"""Weight decay is for matrices: never for norms, biases or anything else with one dimension."""

from collections.abc import Callable

import torch
from workbench import Workbench

from memtrain.config import Config


def test_weight_decay_on_matrices_only(tiny: Callable[..., Config], bench: Workbench) -> None:
    """AdamW, decay 0.1, lr 1e-3, zero gradients, 100 steps: (1 - 1e-4)**100 on matrices, 1 on the rest."""
    step = bench.step(tiny("optimizer.weight_decay=0.1", "optimizer.lr=1e-3"))
    parameters = list(step.model.parameters())
    for parameter in parameters:
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(100):
        step.updates[0].optimizer.step()
    for parameter in parameters:
        expected = 0.990048 if parameter.ndim >= 2 else 1.0
        tolerance = 1e-5 if parameter.ndim >= 2 else 0
        assert (parameter - expected).abs().max() <= tolerance
    grouped = [p for group in step.updates[0].optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, parameters))
