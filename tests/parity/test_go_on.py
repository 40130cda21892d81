"""A saved step put back into another one, whatever its optimizer keeps and wherever it lives, goes on as the first."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from allpairspy import AllPairs

from memtrain.data.loader import Batching, RandomTokens
from memtrain.engine.checkpoint import Checkpoints, read_state
from memtrain.engine.loop import Progress
from memtrain.engine.resume import capture, restore
from memtrain.run_folder import newest

MODES = ("none", "optimizer", "params", "optimizer_nvme", "all_nvme")
NO_MOMENTUM = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1")
KINDS = {
    "no state but masters": (*NO_MOMENTUM, "precision=bf16_true"),
    "no state at all": NO_MOMENTUM,
    "no step count": ("optimizer=lion", "precision=bf16_true"),
    "frozen vectors and matrices": (
        "model.train_only='blocks.*.mlp.*,norm.bias'",
        "model.tied=false",
    ),
}


@pytest.fixture
def bench_step(tiny, bench, tmp_path):
    def build(kind: str, mode: str, number: int):
        folder = tmp_path / f"files{number}"
        folder.mkdir()
        small = ["offload.nvme_buffer_mib=16", f"offload.nvme_dir={folder}", "clip=0.1"]
        return bench.step(tiny(*KINDS[kind], f"offload={mode}", *small))

    return build


def save(step, folder: Path) -> Path:
    loader = RandomTokens(64, 16, 8, Batching(2, 1, 0, prefetch=0))
    with Checkpoints(folder, keep=1) as checkpoints:
        progress = Progress(steps=2, stepped=2)
        checkpoints.save(capture(step, step.model, loader, progress, None, yaml.safe_dump({})))
    found = newest(folder)
    assert found is not None
    return found


def put_back(step, checkpoint: Path) -> Progress:
    return restore(
        checkpoint, step, step.model, RandomTokens(64, 16, 8, Batching(2, 1, 0, prefetch=0))
    )


def test_a_state_of_an_older_version_goes_on(bench, bench_step, tmp_path):
    """Its counters are those that it knew."""
    step = bench_step("no state at all", "none", 1)
    checkpoint = save(step, tmp_path)
    state = read_state(checkpoint)
    for unknown in ("padding", "last_loss"):
        del state["progress"][unknown]
    torch.save(state, checkpoint / "state.pt")
    assert put_back(step, checkpoint) == Progress(steps=2, stepped=2)


@pytest.mark.parametrize(("kind", "before", "after"), list(AllPairs([list(KINDS), MODES, MODES])))
def test_it_goes_on(bench, bench_step, tmp_path, kind, before, after):
    windows = [bench.window(bench.samples(seed=number), 4) for number in range(4)]
    first, second = bench_step(kind, before, 1), bench_step(kind, after, 2)
    for window in windows[:2]:
        first(window)
    put_back(second, save(first, tmp_path / "run"))
    for window in windows[2:]:
        assert torch.equal(first(window), second(window))
    ours, theirs = bench.weights(first), bench.weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("mode", ["optimizer", "optimizer_nvme"])
def test_a_skipped_step_after_going_on_loses_no_state(bench, bench_step, tmp_path, mode):
    """What is saved before a put-back state has been stepped is that state."""
    window = bench.window(bench.samples(), 4)
    kind = "no step count"
    steps = [bench_step(kind, mode, number) for number in (1, 2, 3)]
    steps[0](window)
    put_back(steps[1], save(steps[0], tmp_path / "first"))
    whole = steps[1].loss_function
    steps[1].loss_function = lambda *arguments: whole(*arguments) * math.inf
    assert steps[1](window)[2] == 0
    put_back(steps[2], save(steps[1], tmp_path / "second"))
    assert torch.equal(steps[0](window), steps[2](window))
    ours, theirs = bench.weights(steps[0]), bench.weights(steps[2])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_share_of_the_optimizer_is_for_weights_on_the_device(tiny, bench):
    """With the weights on the host all of it is there: the key warns, and changes nothing."""
    window = bench.window(bench.samples(), 4)
    shares = [
        bench.step(tiny("offload=params", f"offload.optimizer_fraction={s}")) for s in (0.5, 1.0)
    ]
    assert torch.equal(shares[0](window), shares[1](window))
    assert torch.equal(shares[0](window), shares[1](window))
