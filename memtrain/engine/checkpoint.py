"""Weights on disk: safetensors with the model's own parameter names, and its dimensions beside them."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from memtrain.errors import UserError
from memtrain.model.transformer import Dimensions, Transformer

WEIGHTS, DIMENSIONS = "model.safetensors", "model.json"


def save_weights(model: Transformer, folder: Path) -> None:
    """Written under a temporary name and renamed. A tied head is stored once, as the embedding."""
    weights = {name: model.weight(p).cpu().contiguous() for name, p in model.named_parameters()}
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(weights, temporary)
    temporary.replace(folder / WEIGHTS)
    text = json.dumps(asdict(model.dimensions), indent=2)
    (folder / DIMENSIONS).write_text(text + "\n", encoding="utf-8")


def load_weights(folder: Path, device: torch.device) -> Transformer:
    """The model of a finished run, in evaluation mode. Raises UserError where the files are missing or do not fit."""
    try:
        dimensions = Dimensions(**json.loads((folder / DIMENSIONS).read_text(encoding="utf-8")))
        weights = load_file(folder / WEIGHTS)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder}: no loadable weights there ({error}); is it a finished run?"
        ) from error
    with torch.device("meta"):
        model = Transformer(dimensions)
    wanted = {name for name, _ in model.named_parameters()}
    missing, unknown = sorted(wanted - weights.keys()), sorted(weights.keys() - wanted)
    if missing or unknown:
        first = (missing or unknown)[0]
        raise UserError(
            f"{folder / WEIGHTS}: {len(missing)} weights missing, {len(unknown)} unknown, first {first}"
        )
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    model = model.to(device)
    model.tie()
    return model.eval()
