"""A tied head is stored once, is one storage after loading and after a step, and counts once."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from workbench import Workbench

from memtrain.config import Config
from memtrain.engine.checkpoint import load_weights, save_weights
from memtrain.model.transformer import Transformer, count_parameters


def shares(model: Transformer) -> bool:
    return model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_saved_loaded_and_stepped(
    tiny: Callable[..., Config], bench: Workbench, tmp_path: Path
) -> None:
    step = bench.step(tiny("model.tied=true"))
    save_weights(step.model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "embedding.weight" in names and "head.weight" not in names
    loaded = load_weights(tmp_path, torch.device("cpu"))
    assert shares(loaded)
    assert count_parameters(loaded) == count_parameters(step.model) == 53_440
    step(bench.window(bench.samples(), 8))
    assert shares(step.model)
