"""A checkpoint of another model is refused: by how many weights, the first one's name, and before any step."""

from collections.abc import Callable
from pathlib import Path

import pytest
from test_resume_on_the_host import Nowhere, saved
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine.resume import restore
from memtrain.errors import UserError


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("model.n_layers=5", "12 weights missing, 0 unknown, first blocks.4."),
        ("model.n_layers=3", "0 weights missing, 12 unknown, first blocks.3."),
        ("model.dim=64", "is \\(64, 32\\), the model has \\(64, 64\\)"),
    ],
)
def test_weights_do_not_fit(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path, change: str, reason: str
) -> None:
    checkpoint = saved(bench, tiny(), tmp_path)
    step = bench.step(tiny(change))
    before = bench.weights(step)
    with pytest.raises(UserError, match=reason):
        restore(checkpoint, step, step.model, Nowhere())
    assert all(before[name].equal(weight) for name, weight in bench.weights(step).items())
