"""Which model `model=hf` names, who represents it, and why."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memtrain.config import Config
from memtrain.errors import UserError
from memtrain.model.pretrained.config_values import NotNative
from memtrain.model.pretrained.families import Family, find_family
from memtrain.model.pretrained.folder import CONFIG, read_json
from memtrain.model.pretrained.load import Source
from memtrain.model.transformer import Dimensions


@dataclass(frozen=True)
class Published:
    """A model that others have trained, or its config alone."""

    path: Path
    """A folder, a .gguf file, or a config.json."""
    config: dict[str, Any]
    source: Source | None
    """None: a config.json, without weights."""
    family: Family | None
    """None: transformers' own model is trained."""
    why: str
    dimensions: Dimensions


def find_published(config: Config) -> Published | None:
    """None for a model of our own. Raises UserError for a folder or config that cannot be used."""
    wanted = config.model
    if not (wanted.path or wanted.config):
        return None
    path = Path(wanted.path or wanted.config or "").expanduser()
    source = Source(path) if wanted.path else None
    hf_config = (
        dict(source.config) if source else read_json(path / CONFIG if path.is_dir() else path)
    )
    family, why = None, "model.backend=transformers"
    if wanted.backend != "transformers":
        try:
            family, why = (
                usable_family(hf_config, config),
                "every part of it is represented exactly",
            )
        except NotNative as reason:
            if wanted.backend == "native":
                raise UserError(
                    f"model.backend=native: memtrain's Transformer has no {reason}; use auto"
                ) from reason
            why = f"memtrain's has no {reason}"
    dimensions = family.dimensions(hf_config) if family else described(hf_config, config)
    dimensions = replace(dimensions, dropout=wanted.dropout)
    return Published(path, hf_config, source, family, why, dimensions)


def usable_family(hf_config: dict[str, Any], config: Config) -> Family:
    """Raises NotNative where our Transformer does not represent the model, or its layers do not carry an adapter."""
    family = find_family(hf_config)
    if config.adapter.name != "none":
        for ours, theirs in family.table:
            if len(ours) > 1:
                raise NotNative(f"single {theirs[0].rpartition('.')[2]} for an adapter to sit on")
    return family


def described(hf_config: dict[str, Any], config: Config) -> Dimensions:
    """What can be said of any decoder, for FLOPs and headers."""
    text = hf_config.get("text_config") or hf_config

    def count(*keys: str, default: int) -> int:
        return next((text[key] for key in keys if isinstance(text.get(key), int)), default)

    dim = count("hidden_size", "n_embd", "d_model", default=config.model.dim)
    n_heads = count("num_attention_heads", "n_head", "n_heads", default=1)
    return Dimensions(
        vocab_size=count("vocab_size", default=1),
        dim=dim,
        n_layers=config.model.n_layers,
        n_heads=n_heads,
        n_kv_heads=count("num_key_value_heads", default=n_heads),
        ffn_dim=count("intermediate_size", "n_inner", "ffn_dim", default=4 * dim),
        max_seq_len=config.model.max_seq_len,
        positions="rope",
        tied=bool(text.get("tie_word_embeddings", True)),
    )


def tokenizer_folder(path: Path, cache_dir: Path) -> Path:
    """Where the tokenizer files of a folder, or of a .gguf file, are."""
    if path.suffix != ".gguf":
        return path
    from memtrain.model.pretrained.gguf import write_gguf_tokenizer

    return write_gguf_tokenizer(path, cache_dir)


def end_of_text(folder: Path) -> str | None:
    """The token that ends a text, by the folder's tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
