"""Optimizer state comes back to the parameter it is of, by name, and to where the mode keeps it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_resume_on_the_host import Nowhere
from torch import Tensor
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine.checkpoint import Checkpoints
from memtrain.engine.loop import Progress
from memtrain.engine.resume import capture, restore
from memtrain.engine.step import TrainStep
from memtrain.errors import UserError
from memtrain.run_folder import newest

FROZEN = 'model.train_only="first 1,last 1,norm.*"'
OFFLOAD = ("none", "optimizer", "params")


def state(step: TrainStep) -> dict[str, Tensor]:
    """ "parameter/moment" -> values."""
    step.settle()
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {
        f"{names[parameter]}/{own}": torch.as_tensor(value).clone()
        for update in step.updates
        for group in update.param_groups
        for parameter in group["params"]
        for own, value in update.state(parameter).items()
    }


def saved(step: TrainStep, folder: Path) -> Path:
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(capture(step, step.model, Nowhere(), Progress(steps=3), None, "seed: 0\n"))
    checkpoints.wait()
    checkpoint = newest(folder)
    assert checkpoint
    return checkpoint


@pytest.mark.parametrize(("before", "after"), [("none", "none"), ("optimizer", "none"), ("none", "optimizer"),
                                               ("params", "none"), ("none", "params")])  # fmt: skip
def test_moments_are_equal_by_name(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path, before: str, after: str
) -> None:
    first = bench.step(tiny(FROZEN, f"offload={before}"))
    for number in range(3):
        first(bench.window(bench.samples(seed=number), 4))
    checkpoint = saved(first, tmp_path)
    second = bench.step(tiny(FROZEN, f"offload={after}", "seed=1"))
    restore(checkpoint, second, second.model, Nowhere())
    ours, theirs = state(second), state(first)
    moments = [name for name in theirs if name.endswith("/exp_avg")]
    assert moments and not [name for name in theirs if name.startswith(("blocks.1.", "embedding"))]
    for name in moments:
        assert ours[name].equal(theirs[name]), name
    window = bench.window(bench.samples(seed=3), 4)
    assert torch.equal(first(window), second(window))
    weights = bench.weights(first)
    assert all(weights[name].equal(value) for name, value in bench.weights(second).items())


def test_another_layout_is_refused(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path
) -> None:
    first = bench.step(tiny())
    first(bench.window(bench.samples(), 4))
    checkpoint = saved(first, tmp_path)
    second = bench.step(tiny(FROZEN))
    with pytest.raises(UserError, match="was trained there and is frozen here"):
        restore(checkpoint, second, second.model, Nowhere())


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), [("optimizer", "none"), ("none", "optimizer")])
def test_state_is_where_the_mode_says(
    config: Callable[..., Config], bench: Workbench, tmp_path: Path, before: str, after: str
) -> None:
    from memtrain.engine import build

    cuda, steps = torch.device("cuda"), []
    for mode in (before, after):
        chosen = config("debug=tiny", "device=cuda", f"offload={mode}")
        build.prepare_torch(chosen)
        model = build.build_model(chosen, build.build_dimensions(chosen, 64), cuda)
        steps.append(build.build_step(chosen, model, cuda))
    first, second = steps
    first(bench.window(bench.samples(), 4))
    restore(saved(first, tmp_path), second, second.model, Nowhere())
    second(bench.window(bench.samples(), 4))
    moments = {k: v for k, v in state(second).items() if k.endswith("exp_avg")}
    assert {v.device.type for v in moments.values()} == {"cuda" if after == "none" else "cpu"}
