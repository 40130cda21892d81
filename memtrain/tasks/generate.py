"""`task=generate`: text by a finished run."""

from pathlib import Path
from typing import Any

import torch

from memtrain.config import Config
from memtrain.config.derived import resolve_path
from memtrain.data.tokenizer import Tokenizer, load_tokenizer
from memtrain.device import select_device
from memtrain.engine import build
from memtrain.engine.generate import generate as generate_tokens
from memtrain.engine.loaded import load_run
from memtrain.errors import UserError
from memtrain.model.language_model import LanguageModel
from memtrain.model.transformer import count_parameters
from memtrain.report import console
from memtrain.run_folder import WEIGHTS
from memtrain.tasks.run import Place


def sample(config: Config, model: LanguageModel, tokenizer: Tokenizer) -> str:
    """The prompt and what the model makes of it."""
    tokens = generate_tokens(
        model,
        build.prompt_ids(config, tokenizer),
        config.generate.tokens,
        config.generate.temperature,
        config.generate.top_k,
        torch.Generator().manual_seed(config.seed),
    )
    return tokenizer.decode(tokens)


def generate(config: Config, place: Place) -> dict[str, Any]:
    """Continue `generate.prompt` with a finished run."""
    folder = finished_run(config, place, config.generate.run, "generate.run")
    loaded = load_run(folder, select_device(config.device))
    tokenizer = load_tokenizer(run_folder_of(folder) / "tokenizer.json", loaded.end_of_text)
    model = loaded.model
    text = sample(config, model, tokenizer)
    console.print_header([f"from {folder}", "", console.printable(text)])
    return {"sample": text, "from": str(folder), "parameters": count_parameters(model)}


def run_folder_of(folder: Path) -> Path:
    """The run that `folder`, a run's or a checkpoint's, belongs to."""
    return folder if (folder / "tokenizer.json").exists() else folder.parent.parent


def finished_run(config: Config, place: Place, wanted: str | None, key: str) -> Path:
    """What `wanted` names, else the newest finished run of this name. Raises UserError if there is none."""
    if wanted:
        path = resolve_path(wanted, place.base)
        if not path.is_dir():
            raise UserError(f"{key}={wanted}: no such folder; name a run's or a checkpoint's")
        return path
    runs = place.runs or place.folder.parent
    weights = runs.glob(f"*/{WEIGHTS}")
    with_text = (path for path in weights if (path.parent / "tokenizer.json").exists())
    found = sorted(with_text, key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"{key}: no finished run in {runs}; name={config.name} says whose, or name a run's folder"
        )
    return found[-1].parent
