"""`task=export`: a run or a checkpoint as a folder that the Hugging Face ecosystem loads."""

from pathlib import Path
from typing import Any

import torch

from memtrain.config import Config
from memtrain.config.derived import resolve_path
from memtrain.engine.build import adapts
from memtrain.engine.loaded import Loaded, load_run
from memtrain.engine.published import write_adapter, write_model
from memtrain.model.transformer import count_parameters
from memtrain.report import console
from memtrain.tasks.generate import finished_run, run_folder_of
from memtrain.tasks.run import Place

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
FOLDERS = {True: "adapter", False: "hf"}
"""In a run's folder, of an adapter alone and of a whole model."""


def export(config: Config, place: Place) -> dict[str, Any]:
    folder = finished_run(config, place, config.export.run, "export.run")
    loaded = load_run(folder, torch.device("cpu"))
    alone = adapts(loaded.config) and not config.export.merge
    path = config.export.path
    wanted = resolve_path(path, place.base) if path else None
    target = leave(loaded, run_folder_of(folder), alone, wanted, DTYPES[config.export.dtype])
    what = "adapter in peft's format" if alone else "model for from_pretrained"
    console.print_header([f"from       {folder}", f"written    {target} ({what})"])
    return {
        "exported": str(target),
        "from": str(folder),
        "parameters": count_parameters(loaded.model),
    }


def leave(
    loaded: Loaded,
    run_folder: Path,
    alone: bool,
    target: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """The adapter alone, or the whole model with what it adds; the folder comes back."""
    target = target or run_folder / FOLDERS[alone]
    if alone:
        write_adapter(loaded, target)
    else:
        write_model(loaded, target, run_folder, dtype)
    return target
