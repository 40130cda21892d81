"""peft's files: adapter_config.json and adapter_model.safetensors (docs of peft, "Checkpoint format").

base_model.model.<layer>.lora_A.weight, .lora_B.weight, .lora_magnitude_vector
base_model.model.<layer>.weight                     of layers that were trained whole (`modules_to_save`)
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memtrain.errors import UserError
from memtrain.model.adapters.lora import LoraOptions, matching
from memtrain.run_folder import sync_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
OWN = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
"""What peft calls the matrices of a layer, and what they are here."""
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "layer_replication": (None,),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
}
"""Keys of a config with which an adapter is more than these matrices, and what they must be."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter of peft, from its config and the header of its weights."""

    folder: Path
    options: LoraOptions
    ranks: Mapping[str, int]
    """By layer."""
    alphas: Mapping[str, float]
    """Of the layers whose alpha is another than that of `options`."""
    whole: Sequence[str]
    """Parameters that were trained whole, by their names in the model."""

    def options_of(self, layer: str) -> LoraOptions:
        alpha = self.alphas.get(layer, self.options.alpha)
        o = self.options
        return LoraOptions(self.ranks[layer], alpha, o.dropout, o.rslora, o.dora)


def read(folder: Path) -> PeftAdapter:
    """Raises UserError for files that are not there, and for adapters of another kind."""
    config = read_config(folder)
    ranks, whole = {}, []
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                layer, _, own = split(folder, name)
                if own == "a":
                    ranks[layer] = int(file.get_slice(name).get_shape()[0])
                elif not own:
                    whole.append(layer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({error}); get it again") from error
    options = LoraOptions(
        int(config["r"]),
        float(config["lora_alpha"]),
        float(config.get("lora_dropout") or 0.0),
        bool(config.get("use_rslora")),
        bool(config.get("use_dora")),
    )
    patterns = config.get("alpha_pattern") or {}
    found = {layer: pattern_value(patterns, layer) for layer in ranks}
    alphas = {layer: float(alpha) for layer, alpha in found.items() if alpha is not None}
    return PeftAdapter(folder, options, ranks, alphas, whole)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); name a folder of peft's save_pretrained"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"{path}: peft_type={kind}; only LORA can go on here")
    for key, allowed in PLAIN.items():
        if config.get(key) not in allowed:
            raise UserError(f"{path}: {key}={config[key]} has no counterpart here")
    if not all(isinstance(config.get(key), int | float) for key in ("r", "lora_alpha")):
        raise UserError(f"{path}: no r or lora_alpha in it; get it again")
    return config


def pattern_value(patterns: Mapping[str, Any], layer: str) -> Any:
    """As peft looks one up: the first pattern that the end of the name matches."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            return value
    return None


def split(folder: Path, name: str) -> tuple[str, str, str]:
    """(layer or, of one trained whole, parameter; peft's own name; ours, empty for a whole one)."""
    bare = name.removeprefix(PREFIX)
    for theirs, ours in OWN.items():
        if bare.endswith(f".{theirs}"):
            return bare.removesuffix(f".{theirs}"), theirs, ours
    if not name.startswith(PREFIX) or ".lora_" in bare:
        raise UserError(f"{folder / WEIGHTS}: {name} has no counterpart here")
    return bare, "", ""


def tensors_of(adapter: PeftAdapter) -> dict[tuple[str, str], Tensor]:
    """(layer or parameter, ours) -> values."""
    with safe_open(adapter.folder / WEIGHTS, "pt") as file:
        names = {name: split(adapter.folder, name) for name in file.keys()}  # noqa: SIM118
        return {(layer, ours): file.get_tensor(name) for name, (layer, _, ours) in names.items()}


def write(
    folder: Path,
    tensors: Mapping[tuple[str, str], Tensor],
    options: LoraOptions,
    all_layers: Sequence[str],
    about: Mapping[str, Any],
) -> None:
    """`tensors` by (layer or parameter, ours) as `tensors_of` gives them; `about`: further keys of the config."""
    theirs = {ours: name for name, ours in OWN.items()}
    named = {
        f"{PREFIX}{layer}.{theirs[ours]}" if ours else f"{PREFIX}{layer}": values
        for (layer, ours), values in tensors.items()
    }
    layers = [layer for layer, ours in tensors if ours == "a"]
    whole = sorted({layer.rpartition(".")[0] for layer, ours in tensors if not ours})
    ranks = {layer: len(values) for (layer, ours), values in tensors.items() if ours == "a"}
    other = {layer: rank for layer, rank in ranks.items() if rank != options.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": shortest_targets(layers, all_layers),
        "modules_to_save": whole or None,
        "rank_pattern": other,
        "bias": "none",
        "inference_mode": True,
        **about,
    }
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    values = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()
    }
    save_file(values, new / WEIGHTS, metadata={"format": "pt"})
    (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sync_folder(new)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    sync_folder(folder.parent)


def shortest_targets(layers: Sequence[str], all_layers: Sequence[str]) -> list[str]:
    """Last parts of names, where they mean just these layers; else the names in full."""
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = [layer for layer in all_layers if any(matching(layer, end) for end in ends)]
    return ends if set(meant) == set(layers) else sorted(layers)


def check_shape(folder: Path, layer: str, found: torch.Size, wanted: torch.Size) -> None:
    if found != wanted:
        raise UserError(
            f"{folder}: {layer} is {tuple(found)}, the model takes {tuple(wanted)}; is the adapter of another base?"
        )
