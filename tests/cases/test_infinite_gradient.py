"""A finite loss with an infinite gradient changes nothing, with no scaler to catch it, and is reported."""

import itertools
import math
from collections.abc import Callable

import torch
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine import build
from memtrain.engine.loop import Callbacks, Pace, train


def test_one_of_five_steps_is_skipped(tiny: Callable[..., Config], bench: Workbench) -> None:
    config = tiny("precision=bf16", "clip=1.0")
    step = bench.step(config)
    calls = itertools.count(1)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            gradient = gradient.clone()
            gradient[0] = math.inf
        return gradient

    step.model.norm.weight.register_hook(spoil)
    seen: list[list[torch.Tensor]] = []
    records: list[dict] = []

    def observe(record: dict) -> None:
        records.append(record)
        seen.append([p.detach().clone() for p in step.model.parameters()])

    train(
        step, itertools.repeat(bench.window(bench.samples(), 8)), build.build_schedule(config),
        Pace(5, log_every=1, max_skipped=2), Callbacks(observe),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))
    assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1]
    assert math.isfinite(records[2]["loss"]) and not math.isfinite(records[2]["grad_norm"])
    assert all(p.isfinite().all() for p in step.model.parameters())
