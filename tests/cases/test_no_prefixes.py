"""Weights are saved under the model's own names, compiled or not, and each loads as the other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine.checkpoint import load_weights, save_weights


@pytest.mark.parametrize("compiled", ["off", "blocks", "model"])
def test_names_and_weights(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path, compiled: str
) -> None:
    plain = bench.step(tiny('compile="off"')).model
    model = bench.step(tiny(f'compile="{compiled}"')).model
    save_weights(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == {name for name, _ in plain.named_parameters()}
    assert not [name for name in names if "_orig_mod" in name or name.startswith("module.")]
    loaded = dict(load_weights(tmp_path, torch.device("cpu")).named_parameters())
    assert all(loaded[name].equal(weight) for name, weight in plain.named_parameters())
