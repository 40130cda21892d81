"""A .gguf file by transformers' own reader: all of it is unpacked in host memory, in fp32."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import UserError


@dataclass(frozen=True)
class Unpacked:
    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def rows(self, first: int, n: int) -> Tensor:
        return self.values[first : first + n]


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Raises UserError where transformers cannot read it, or its reader is not installed."""
    return _read(path, "AutoConfig").to_dict()  # type: ignore[no-any-return]


def read_gguf_tensors(path: Path) -> dict[str, Unpacked]:
    model = _read(path, "AutoModelForCausalLM", dtype=torch.float32)
    seen: dict[int, str] = {}
    found = {}
    for name, values in model.state_dict().items():
        if seen.setdefault(values.data_ptr(), name) == name:  # a tied head is the embedding
            found[name] = Unpacked(values)
    return found


def write_gguf_tokenizer(path: Path, cache_dir: Path) -> Path:
    """The folder, in the cache, with the tokenizer that transformers makes of it, chat template included."""
    about = path.stat()
    key = hashlib.sha256(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()
    folder = cache_dir / f"gguf-{key[:16]}"
    if not folder.exists():
        new = folder.with_name(f".{folder.name}.{os.getpid()}")
        _read(path, "AutoTokenizer").save_pretrained(new)
        try:
            new.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _read(path: Path, reader: str, **options: Any) -> Any:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    try:
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise UserError(
            f"{path}: reading it needs transformers and gguf; pip install 'memtrain[hf,gguf]'"
        ) from error
    try:
        load = getattr(transformers, reader).from_pretrained
        return load(path.parent, gguf_file=path.name, **options)
    except (OSError, ValueError, KeyError, NotImplementedError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: transformers cannot read it: {reason}") from error
