"""A step that is not finite changes nothing and is counted; what surrounds it advances only with real steps."""

import itertools
import math

import pytest
import torch
from allpairspy import AllPairs
from optimizer_choices import HOST_OPTIMIZERS, OPTIMIZERS

from memtrain.engine import build
from memtrain.engine.generate import generate
from memtrain.engine.loop import Callbacks, Pace, train
from memtrain.errors import NotFiniteError


def poison(step, at_call: int, value: float = math.inf) -> None:
    """From the forward pass number `at_call` on its loss becomes `value`, once."""
    calls = itertools.count(1)
    whole = step.loss_function

    def loss(*arguments):
        summed = whole(*arguments)
        return summed * value if next(calls) == at_call else summed

    step.loss_function = loss


def state_of(step):
    step.settle()
    tensors = [p.detach().clone() for p in step.model.parameters()]
    (update,) = step.updates
    for parameter in step.model.parameters():
        state = update.state(parameter)
        tensors += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return tensors


@pytest.mark.parametrize(
    ("precision", "offload", "value"),
    list(
        AllPairs(
            [["fp32", "bf16", "fp16", "bf16_true"], ["none", "optimizer"], [math.inf, math.nan]]
        )
    ),
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_moments_stay(tiny, bench, precision, offload, optimizer, value):
    if offload == "optimizer" and optimizer not in HOST_OPTIMIZERS:
        pytest.skip("refused together")
    step = bench.step(
        tiny(f"precision={precision}", f"offload={offload}", f"optimizer={optimizer}", "clip=1.0")
    )
    scale = step.scaler.get_scale()
    poison(step, at_call=3, value=value)
    window = bench.window(bench.samples(), 4)
    step(window)
    before = state_of(step)
    _, norm, stepped = step(window).tolist()
    assert not math.isfinite(norm)
    assert not stepped
    after = state_of(step)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if precision == "fp16":
        assert step.scaler.get_scale() == scale / 2
    assert step(window)[2] == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_first_step_that_is_skipped_leaves_sound_state(tiny, bench, optimizer):
    """The second step after a skipped first one equals a first step."""
    window = bench.window(bench.samples(), 8)
    plain = bench.step(tiny(f"optimizer={optimizer}"))
    plain(window)
    step = bench.step(tiny(f"optimizer={optimizer}"))
    poison(step, at_call=1)
    step(window)
    step(window)
    for ours, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_schedule_and_counters_follow_real_steps(tiny, bench):
    config = tiny("precision=fp16", "steps=6", "schedule.warmup=3")
    step = bench.step(config)
    poison(step, at_call=2)
    window = bench.window(bench.samples(), 8)
    records = []
    progress = train(
        step, itertools.repeat(window), build.build_schedule(config),
        Pace(6, log_every=1, max_skipped=3), Callbacks(records.append),
    )  # fmt: skip
    assert (progress.steps, progress.stepped, progress.skipped) == (6, 5, 1)
    rates = [record["lr"] for record in records]
    assert rates[1] == rates[2] == pytest.approx(config.optimizer.lr * 2 / 3)
    assert rates[3] == pytest.approx(config.optimizer.lr)
    assert [record["loss_scale"] for record in records] == [65536.0] + [32768.0] * 5
    assert not math.isfinite(records[1]["loss"])
    assert [record.get("last_loss") for record in records] == [
        None,
        records[0]["loss"],
        *[None] * 4,
    ]
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 1, 1, 1]


def test_too_many_in_a_row_stop_the_run(tiny, bench):
    config = tiny("optimizer.max_skipped=3")
    step = bench.step(config)
    step.loss_function = lambda hidden, *_: hidden.sum() * math.nan
    with pytest.raises(NotFiniteError, match=r"step 3: .* 3 times in a row"):
        train(
            step, itertools.repeat(bench.window(bench.samples(), 8)), build.build_schedule(config),
            Pace(9, log_every=1, max_skipped=3), Callbacks(lambda record: None),
        )  # fmt: skip


def trained(bench, step, config, steps):
    return train(
        step, itertools.repeat(bench.window(bench.samples(), 8)), build.build_schedule(config),
        Pace(steps, log_every=1, max_skipped=9), Callbacks(lambda record: None),
    )  # fmt: skip


def test_a_last_step_that_is_skipped_is_only_counted(tiny, bench):
    config = tiny("precision=fp16")
    step = bench.step(config)
    poison(step, at_call=3)
    progress = trained(bench, step, config, 3)
    assert (progress.stepped, progress.skipped) == (2, 1)


def test_there_is_no_text_in_a_model_that_is_not_finite(tiny, bench):
    model = bench.step(tiny()).model
    model.norm.weight.data.fill_(math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFiniteError, match="logits are not finite"):
            generate(model, [1], 1, temperature, 0, torch.Generator())


def test_a_run_without_one_finite_step_has_failed(tiny, bench):
    config = tiny()
    step = bench.step(config)
    step.loss_function = lambda hidden, *_: hidden.sum() * math.nan
    with pytest.raises(NotFiniteError, match="none of 3 steps was finite"):
        trained(bench, step, config, 3)


def test_a_window_with_nothing_to_learn_makes_no_step(tiny, bench):
    step = bench.step(tiny())
    window = bench.window(bench.samples(), 8)
    step(window)
    before = state_of(step)
    batch = bench.samples()
    batch.targets.fill_(-100)
    batch.n_targets = 0
    loss, _, stepped = step([batch]).tolist()
    assert loss == 0
    assert not stepped
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(step), strict=True))


def test_a_masked_micro_batch_counts_nothing(tiny, bench):
    batch = bench.samples(4)
    masked = bench.samples(4, seed=1)
    masked.targets.fill_(-100)
    masked.n_targets = 0
    step, plain = bench.step(tiny()), bench.step(tiny())
    step([batch, masked])
    plain([batch])
    for ours, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
