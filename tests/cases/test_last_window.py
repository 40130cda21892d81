"""The last, incomplete window of an epoch is a window of its own: applied, and divided by what it holds."""

from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from workbench import Scalar

from memtrain.data.loader import Batching, Loader
from memtrain.engine.step import TrainStep
from memtrain.engine.update import PlainUpdate

CPU = torch.device("cpu")


def summed(hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
    """The gradient of its mean over targets is 1."""
    return hidden.sum() * factor


def test_ten_micro_batches_by_four_are_three_steps() -> None:
    model = Scalar()
    step = TrainStep(
        model=model,  # type: ignore[arg-type]
        loss_function=summed,
        updates=[PlainUpdate(torch.optim.SGD(model.parameters(), lr=1.0, fused=True))],
        scaler=GradScaler("cpu", enabled=False),
        device=CPU,
        compute_dtype=None,
        clip=0.0,
    )
    loader = Loader(np.arange(10 * 4 + 1), 4, Batching(1, 4, seed=0, prefetch=0))
    assert loader.windows_per_epoch == 3
    values, sizes = [], []
    for window in islice(loader, 6):
        step(window)
        sizes.append(len(window))
        values.append(model.head.weight.item())
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert (values[2], values[5]) == (-3.0, -6.0)
