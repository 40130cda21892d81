"""What the config.json of a Hugging Face model says of the keys that rules look at. No torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.config.tree import Config
from memtrain.errors import UserError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")


def is_published(config: Config) -> bool:
    """Whether the model comes from a folder, a file or a config.json of others."""
    return config.model.path is not None or config.model.config is not None


def with_published_layers(config: Config) -> Config:
    """`model.n_layers` and `model.max_seq_len` as that model has them. Raises UserError for a config.json that is
    not there or is none."""
    path = config.model.path or config.model.config
    if not path:
        return config
    found = published_config(Path(path).expanduser())
    found = found.get("text_config") or found
    layers = next((found[key] for key in LAYERS if isinstance(found.get(key), int)), None)
    longest = next((found[key] for key in POSITIONS if isinstance(found.get(key), int)), None)
    model = replace(
        config.model,
        n_layers=layers or config.model.n_layers,
        max_seq_len=longest or max(config.model.max_seq_len, config.seq_len),
    )
    return replace(config, model=model)


def published_config(path: Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        return gguf_layers(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file}: not there; name a folder as save_pretrained leaves it")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); get it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds no table of keys; get it again")
    return found


def gguf_layers(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{path}: needs gguf; pip install 'memtrain[gguf]'") from error
    try:
        fields = GGUFReader(path).fields
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path}: not a whole .gguf file ({error}); get it again") from error
    found = {name.partition(".")[2]: field for name, field in fields.items()}
    keys = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"}
    return {ours: int(found[key].contents()) for key, ours in keys.items() if key in found}
