"""A micro-batch without a target adds nothing; a window without one takes no step, and is no error."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from memtrain.config import Config
from memtrain.data.loader import IGNORE_INDEX, Batch
from memtrain.engine import build
from memtrain.engine.loop import Callbacks, Pace, train
from memtrain.engine.step import TrainStep

CPU = torch.device("cpu")


def make_step(config: Config) -> TrainStep:
    build.prepare_torch(config)
    model = build.build_model(config, build.build_dimensions(config, 64), CPU)
    return build.build_step(config, model, CPU)


def samples(seed: int = 0) -> Batch:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 32)


def masked(batch: Batch) -> Batch:
    return replace(batch, targets=torch.full_like(batch.targets, IGNORE_INDEX), n_targets=0)


@pytest.mark.parametrize("loss", ["loss=chunked", "loss=full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_true"])
def test_a_masked_micro_batch_adds_nothing(
    tiny: Callable[..., Config], loss: str, precision: str
) -> None:
    config = tiny(loss, f"precision={precision}")
    both, first = make_step(config), make_step(config)
    loss_of_both = both([samples(), masked(samples(1))])[0]
    assert torch.isfinite(loss_of_both)
    assert torch.equal(loss_of_both, first([samples()])[0])
    for ours, theirs in zip(both.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_masked_window_takes_no_step(tiny: Callable[..., Config]) -> None:
    step = make_step(tiny("optimizer.weight_decay=0.5"))
    step([samples()])
    before = [p.detach().clone() for p in step.model.parameters()]
    loss, norm, stepped = step([masked(samples()), masked(samples(1))]).tolist()
    assert (loss, norm, stepped) == (0.0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


def test_masked_windows_do_not_end_a_run(tiny: Callable[..., Config]) -> None:
    """They are counted as skipped, but the run has not gone wrong."""
    config = tiny("optimizer.max_skipped=2")
    windows = itertools.chain([[samples()]], itertools.repeat([masked(samples())]))
    progress = train(
        make_step(config), windows, build.build_schedule(config),
        Pace(8, log_every=1, max_skipped=2), Callbacks(lambda record: None),
    )  # fmt: skip
    assert (progress.stepped, progress.skipped) == (1, 7)
