"""A folder as `save_pretrained` leaves it: its config, and where its tensors lie, from headers alone.

config.json
model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json
tokenizer files, generation_config.json
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memtrain.errors import UserError
from memtrain.model.pretrained.config_values import HFConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""What weights can be stored in, by the names of the safetensors format."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file; its first byte is at `start`."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, first: int, n: int) -> Tensor:
        """(n, ...): a view of the mapped file."""
        row_bytes = self.dtype.itemsize * torch.Size(self.shape[1:]).numel()
        start = self.start + first * row_bytes
        values = mapped(self.path)[start : start + n * row_bytes].view(self.dtype)
        return values.view(n, *self.shape[1:])


@lru_cache(maxsize=4)
def mapped(path: Path) -> Tensor:
    """(bytes of the file,), uint8; nothing is read before it is looked at."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def read_config(folder: Path) -> dict[str, Any]:
    """Raises UserError where there is none, or where the weights are quantized."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one as `save_pretrained` leaves it")
    if not path.exists():
        raise UserError(f"{folder}: no {CONFIG}; name a folder as `save_pretrained` leaves it")
    found = read_json(path)
    if found.get("quantization_config"):
        method = dict(found["quantization_config"]).get("quant_method", "unknown method")
        raise UserError(
            f"{path}: its weights are quantized ({method}); name the folder of the model before that"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); get it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no table of keys; get it again")
    return found


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """By name. Raises UserError for a file that is not there or not whole."""
    if (folder / INDEX).exists():
        return _sharded(folder)
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UserError(
            f"{folder}: only pickled weights, which can run code and are not read; if you trust them, convert them: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    raise UserError(f"{folder}: no {WEIGHTS} and no {INDEX}; get the folder again")


def _sharded(folder: Path) -> dict[str, Stored]:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise UserError(f"{folder / INDEX}: no weight_map in it; get it again")
    found: dict[str, Stored] = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise UserError(f"{folder / INDEX}: {shard!r} is not a file beside it")
        if not (folder / shard).exists():
            raise UserError(f"{folder / shard}: is not there, and {INDEX} names it; get it again")
        found |= read_header(folder / shard)
    missing = sorted(where.keys() - found.keys())
    if missing:
        raise UserError(f"{folder / where[missing[0]]}: {missing[0]} is not in it; get it again")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, "pt"):  # checks that header and length fit
            pass
        with path.open("rb") as file:
            n_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(n_bytes))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); get it again") from error
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{path}: {name} is stored as {entry['dtype']}; weights are read from {', '.join(DTYPES)}"
            )
        start = 8 + n_bytes + entry["data_offsets"][0]
        found[name] = Stored(path, start, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return found


def generation_config(folder: Path) -> HFConfig | None:
    path = folder / GENERATION
    return read_json(path) if path.exists() else None
