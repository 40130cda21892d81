"""What follows from several keys: homes, blocks, segments, steps, paths."""

import math
import re
from dataclasses import replace
from pathlib import Path

from memtrain.config.bounds import MOST
from memtrain.config.model import ModelConfig
from memtrain.config.tree import BlockPolicy, Config, Home
from memtrain.errors import UserError


def resolved_n_kv_heads(model: ModelConfig) -> int:
    return model.n_kv_heads or model.n_heads


def named_blocks(text: str | int, n_layers: int, key: str) -> list[int]:
    """The block numbers that `all`, `3`, `0-3`, `every 2`, `first 4`, `last 4` or a list of these with commas means."""
    found: set[int] = set()
    for part in str(text).split(","):
        found.update(_block_range(part.strip(), n_layers, key))
    return sorted(found)


def _block_range(part: str, n_layers: int, key: str) -> range:
    if part == "all":
        return range(n_layers)
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part):
        low, high = int(match[1]), int(match[2] or match[1])
        if low <= high < n_layers:
            return range(low, high + 1)
        raise UserError(f"{key}={part}: the model has blocks 0 to {n_layers - 1}")
    if match := re.fullmatch(r"(every|first|last) (\d+)", part):
        count = int(match[2])
        if count:
            ranges = {"every": range(0, n_layers, count), "first": range(min(count, n_layers))}
            return ranges.get(match[1], range(max(0, n_layers - count), n_layers))
    raise UserError(
        f"{key}={part}: use all, 3, 0-3, every 2, first 4 or last 4, several with commas"
    )


def optimizer_home(config: Config) -> Home:
    """Where master weights and moments are."""
    mode = config.offload.mode
    if mode in ("none", "activations"):
        return "device"
    return "nvme" if mode.endswith("_nvme") else "host"


def weights_home(config: Config) -> Home:
    """Where the weights are between their uses; gradients add up there, too, unless it is the device."""
    if config.offload.mode == "all_nvme":
        return "nvme"
    return "host" if config.offload.mode in ("params", "params_nvme", "all") else "device"


def offloads_activations(config: Config) -> bool:
    """Whether `offload` moves activations (`checkpointing` may do so by itself)."""
    return config.offload.mode in ("activations", "all", "all_nvme")


def blocks_with(config: Config, policy: BlockPolicy) -> set[int]:
    """Those that `checkpointing=per_block` gives this policy."""
    wanted = config.checkpointing
    given = wanted.per_block if wanted.policy == "per_block" else []
    return {index for index, own in enumerate(given) if own == policy}


def offloaded_blocks(config: Config) -> set[int] | None:
    """Blocks whose activations are to leave; None where nothing asks for that, or the budget is to choose."""
    if chosen := blocks_with(config, "offload"):
        return chosen
    if not offloads_activations(config):
        return None
    named = named_blocks(config.offload.blocks, config.model.n_layers, "offload.blocks")
    share = config.offload.activations_fraction
    return {block for k, block in enumerate(named) if int((k + 1) * share) > int(k * share)}


def last_segment(config: Config) -> set[int]:
    """Its blocks: backward uses at once what they keep."""
    last = config.model.n_layers - 1
    wanted, every = config.checkpointing, segment_blocks(config)
    if wanted.policy not in ("segments", "sqrt") or not every:
        return {last}
    chosen = set(named_blocks(wanted.blocks, config.model.n_layers, "checkpointing.blocks"))
    first = last
    while first - 1 in chosen and last in chosen:
        first -= 1  # of the run of chosen blocks that ends with the last one, cut after `every`
    return set(range(last - (last - first) % every, last + 1))


def segment_blocks(config: Config) -> int:
    """Blocks per recomputed segment, `sqrt` resolved; 0: nothing is recomputed."""
    if config.checkpointing.policy == "sqrt":
        return max(1, round(math.sqrt(config.model.n_layers)))
    return config.checkpoint_every


def with_steps(config: Config, windows_per_epoch: int) -> Config:
    """`epochs` become the steps that they are. Raises UserError for more of them than `steps` may be."""
    if config.epochs is None:
        return config
    steps = math.ceil(round(windows_per_epoch * config.epochs, 6))  # 10 x 0.7 is a little over 7
    if steps > MOST:
        raise UserError(f"epochs={config.epochs:g}: {steps} steps, at most {MOST} are possible")
    return replace(config, steps=max(1, steps), epochs=None)


def selective_blocks(config: Config) -> set[int]:
    """Blocks that are, or with a budget may be, recomputed selectively."""
    wanted, n_layers = config.checkpointing, config.model.n_layers
    if wanted.policy == "selective":
        return set(named_blocks(wanted.blocks, n_layers, "checkpointing.blocks"))
    return set(range(n_layers)) if wanted.policy == "budget" else blocks_with(config, "selective")


def resolve_path(path: str, base: Path) -> Path:
    """A user's path: `~` expanded, relative to where the command was typed."""
    return base / Path(path).expanduser()
