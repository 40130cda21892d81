"""The schedule counts windows: accumulation moves neither the warm-up nor anything after it."""

import itertools
from collections.abc import Callable

import pytest
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine import build
from memtrain.engine.loop import Callbacks, Pace, train


def rates(tiny: Callable[..., Config], bench: Workbench, accum: int, steps: int) -> list[float]:
    config = tiny(f"accum={accum}", "schedule.warmup=10", "steps=20")
    window = bench.window(bench.samples(2 * accum), 2)
    assert len(window) == accum
    records: list[dict] = []
    train(
        bench.step(config), itertools.repeat(window), build.build_schedule(config),
        Pace(steps, log_every=1, max_skipped=1), Callbacks(records.append),
    )  # fmt: skip
    return [record["lr"] for record in records]


def test_the_rate_at_a_step_is_the_same_for_every_accum(
    tiny: Callable[..., Config], bench: Workbench
) -> None:
    plain, by_four = rates(tiny, bench, 1, 20), rates(tiny, bench, 4, 20)
    assert plain == by_four
    peak = tiny().optimizer.lr
    assert plain[:10] == pytest.approx([peak * step / 10 for step in range(1, 11)])
    assert max(plain) == plain[9] and plain[10] < peak


def test_eight_micro_batches_are_two_steps(tiny: Callable[..., Config], bench: Workbench) -> None:
    assert len(rates(tiny, bench, 4, 2)) == 2
