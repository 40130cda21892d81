"""A folder that `AutoModelForCausalLM.from_pretrained` loads, written a few rows in memory at a time."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import UserError
from memtrain.model.pretrained.config_values import HFConfig
from memtrain.model.pretrained.families import Rows
from memtrain.model.pretrained.folder import (
    CONFIG,
    DTYPES,
    GENERATION,
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
)
from memtrain.model.pretrained.load import PIECE_BYTES, shapes_of_theirs
from memtrain.run_folder import sync_folder, write_synced

SHARD_BYTES = 5 * 10**9
"""As transformers has it."""

STALE = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "dtype")
"""Keys of a config that are not true of what is written; `torch_dtype` is read by every version."""


@dataclass(frozen=True)
class Tensors:
    """What is written: names and shapes, and where the values come from, when they are asked for."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    read: Callable[[str], Tensor]


def tensors_as(
    rows: Sequence[Rows],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    weight: Callable[[str], Tensor],
) -> Tensors:
    """Our parameters under their names; `weight` gives one of ours by name, of which `shapes` has all."""
    groups = {name: (group, index) for group in rows for index, name in enumerate(group.theirs)}

    def read(name: str) -> Tensor:
        group, index = groups[name]
        if len(group.ours) > 1:
            return torch.cat([weight(ours).detach() for ours in group.ours])
        whole = weight(group.ours[0]).detach()
        if len(group.theirs) > 1:
            start, stop = list(pairwise(accumulate(group.heights, initial=0)))[index]
            return whole[start:stop]
        return whole.t() if group.transposed else whole

    theirs = {
        name: shape
        for group in rows
        for name, shape in zip(group.theirs, shapes_of_theirs(group, shapes), strict=True)
    }
    return Tensors(theirs, dtype, read)


def write_folder(
    folder: Path,
    hf_config: HFConfig,
    tensors: Tensors,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    generation: HFConfig | None = None,
) -> None:
    """Written under another name, synced and renamed: whoever finds `folder` finds all of it.

    An earlier one is replaced; UserError for a folder that holds anything else.
    """
    refuse_others(folder)
    new, old = (folder.with_name(f".{folder.name}.{what}") for what in ("new", "old"))
    for left in (new, old):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        write_files(new, hf_config, tensors, shard_bytes, tokenizer, generation)
        sync_folder(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_files(
    folder: Path,
    hf_config: HFConfig,
    tensors: Tensors,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    generation: HFConfig | None = None,
) -> None:
    """Into `folder`, synced: for whoever renames it."""
    shards = list(split(tensors, shard_bytes))
    names = [WEIGHTS]
    if len(shards) > 1:
        last = len(shards)
        names = [f"model-{n:05d}-of-{last:05d}.safetensors" for n in range(1, last + 1)]
        total = sum(n_bytes(shape, tensors.dtype) for shape in tensors.shapes.values())
        where = {name: file for file, held in zip(names, shards, strict=True) for name in held}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for file, held in zip(names, shards, strict=True):
        write_safetensors(folder / file, held, tensors)
    kept = {key: value for key, value in hf_config.items() if key not in STALE}
    write_json(folder / CONFIG, kept | {"torch_dtype": str(tensors.dtype).removeprefix("torch.")})
    if generation is not None:
        write_json(folder / GENERATION, generation)
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            write_synced(folder / name, [(tokenizer / name).read_bytes()])


def refuse_others(folder: Path) -> None:
    ours = {CONFIG, GENERATION, INDEX, *TOKENIZER_FILES}
    there = [path.name for path in folder.iterdir()] if folder.exists() else []
    others = [name for name in there if name not in ours and not name.endswith(".safetensors")]
    if others or (there and CONFIG not in there):
        raise UserError(f"{folder}: holds {min(others or there)} already; choose another folder")


def split(tensors: Tensors, shard_bytes: int) -> Iterator[list[str]]:
    """Names in shards of up to `shard_bytes`, a larger tensor alone."""
    shard: list[str] = []
    size = 0
    for name, shape in tensors.shapes.items():
        more = n_bytes(shape, tensors.dtype)
        if shard and size + more > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += more
    yield shard


def write_safetensors(path: Path, names: Sequence[str], tensors: Tensors) -> None:
    """One tensor in memory at a time; transformers asks for the `format`."""
    stored_as = {dtype: name for name, dtype in DTYPES.items()}[tensors.dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + n_bytes(tensors.shapes[name], tensors.dtype)
        header[name] = {"dtype": stored_as, "shape": tensors.shapes[name]}
        header[name]["data_offsets"] = [offset, end]
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = (piece for name in names for piece in bytes_of(tensors, name))
    write_synced(path, [len(text).to_bytes(8, "little"), text], values)


def bytes_of(tensors: Tensors, name: str) -> Iterator[memoryview]:
    values = tensors.read(name)
    assert tuple(values.shape) == tuple(tensors.shapes[name]), name
    row_bytes = n_bytes(values.shape[1:], tensors.dtype)
    for rows in torch.split(values, max(1, PIECE_BYTES // row_bytes)):
        piece = rows.to("cpu", tensors.dtype).contiguous()
        yield piece.view(-1).view(torch.uint8).numpy().data


def n_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_synced(path, [(json.dumps(value, indent=2) + "\n").encode()])
