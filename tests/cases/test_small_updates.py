"""precision=bf16 keeps fp32 weights: a hundred updates of a thousandth are a tenth, and decay decays."""

from collections.abc import Callable

import pytest
import torch
from workbench import Workbench

from memtrain.config import Config


@pytest.mark.parametrize(
    ("optimizer", "gradient", "decay", "value"),
    [("sgd", 1.0, 0.0, 0.9000), ("adamw", 1.0, 0.0, 0.9000), ("adamw", 0.0, 0.1, 0.99005)],
)
def test_weights_of_one(
    tiny: Callable[..., Config],
    bench: Workbench,
    optimizer: str,
    gradient: float,
    decay: float,
    value: float,
) -> None:
    choice = [f"optimizer={optimizer}", "optimizer.momentum=0", f"optimizer.weight_decay={decay}"]
    step = bench.step(tiny("precision=bf16", "optimizer.lr=1e-3", *choice))
    (update,) = step.updates
    matrix = step.model.blocks[0].mlp.up.weight
    for parameter in step.model.parameters():
        parameter.data.fill_(1.0)
    for _ in range(100):
        for parameter in step.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        update.norms()
        update.step(None, torch.zeros(()), lambda: None)
    update.settle()
    assert matrix.mean().item() == pytest.approx(value, abs=1e-3)
