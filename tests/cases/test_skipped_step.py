"""A step that the loss scaler skips moves neither the schedule nor the weight, and halves the scale."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from workbench import Scalar

from memtrain.data.loader import Batch
from memtrain.engine.loop import Callbacks, Pace, train
from memtrain.engine.step import TrainStep
from memtrain.engine.update import PlainUpdate


def test_two_of_three_steps_count() -> None:
    model, calls = Scalar(), itertools.count()

    def loss(hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Its gradient is 1, and infinite in the second call."""
        return hidden.sum() * factor * (math.inf if next(calls) == 1 else 1.0)

    step = TrainStep(
        model=model,  # type: ignore[arg-type]
        loss_function=loss,
        updates=[PlainUpdate(torch.optim.SGD(model.parameters(), lr=1.0, fused=True))],
        scaler=GradScaler("cpu", init_scale=65536.0),
        device=torch.device("cpu"),
        compute_dtype=None,
        clip=0.0,
    )
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    records: list[dict] = []
    progress = train(
        step, itertools.repeat([Batch(tokens, tokens, 4)]), lambda stepped: 0.5**stepped,
        Pace(3, log_every=1, max_skipped=2), Callbacks(records.append),
    )  # fmt: skip
    assert [record["lr"] for record in records] == [1.0, 0.5, 0.5]
    assert 0.5**progress.stepped == 0.25
    assert model.head.weight.item() == pytest.approx(-1.5)
    assert step.scaler.get_scale() == 32768
