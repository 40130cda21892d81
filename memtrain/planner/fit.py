"""What would make a run fit: its neighbours, planned, the cheapest first."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from memtrain.cards import CONF_DIR, Card
from memtrain.config import Config
from memtrain.config.derived import segment_blocks
from memtrain.config.rules import RULES
from memtrain.config.tree import OffloadMode, Precision
from memtrain.errors import UserError
from memtrain.model.transformer import Dimensions
from memtrain.planner.predict import predict
from memtrain.planner.speed import estimate_speed


@dataclass(frozen=True)
class Neighbour:
    """A config near the one that did not fit, and the overrides that lead to it."""

    overrides: tuple[str, ...]
    config: Config


@dataclass(frozen=True)
class Suggestion:
    overrides: tuple[str, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_bytes: int
    tokens_per_second: float


def suggest(
    config: Config,
    dimensions: Dimensions,
    card: Card,
    most: int = 3,
    host_bytes: int | None = None,
) -> list[Suggestion]:
    """The fastest neighbours that fit `card`, and `host_bytes` of host memory if given; none if nothing fits."""
    fitting = []
    for neighbour in neighbours(config):
        if not is_valid(neighbour.config):
            continue
        report = predict(neighbour.config, dimensions, card).report
        if not report.fits or (host_bytes is not None and report.host_peak_bytes > host_bytes):
            continue
        speed = estimate_speed(report, card, config.precision.tf32, neighbour.config.accum)
        tokens = neighbour.config.micro_batch * neighbour.config.accum * config.seq_len
        fitting.append(
            Suggestion(
                neighbour.overrides,
                report.peak_allocated_bytes,
                report.peak_reserved_bytes,
                report.host_peak_bytes,
                tokens / speed.step_seconds,
            )
        )
    return sorted(fitting, key=lambda found: -found.tokens_per_second)[:most]


def is_valid(config: Config) -> bool:
    """Whether the command that is suggested would be accepted."""
    try:
        for rule in RULES:
            rule(config)
    except UserError:
        return False
    return True


def neighbours(config: Config) -> Iterator[Neighbour]:
    """One change at a time, then chains of them; each keeps the tokens of a step."""
    start = Neighbour((), config)
    if config.checkpointing.policy == "per_block":  # a choice for this config alone
        (start,) = recomputes(config)
        yield start
    for options in (
        chunked_loss,
        smaller_batches,
        recomputes,
        offloads,
        in_backward,
        precisions,
    ):
        for option in options(start.config):
            yield Neighbour((*start.overrides, *option.overrides), option.config)
    yield from chain(start, chunked_loss, recomputes, smaller_batches, offloads, precisions)
    yield from chain(start, chunked_loss, recomputes, offloads, precisions)


def chain(start: Neighbour, *links: Callable[[Config], Iterator[Neighbour]]) -> Iterator[Neighbour]:
    """`start` with the strongest option of one link after the other added, from two changes on."""
    current, changes = start, 0
    for link in links:
        for option in list(link(current.config))[-1:]:
            current = Neighbour((*current.overrides, *option.overrides), option.config)
            changes += 1
            if changes > 1:
                yield current


def smaller_batches(config: Config) -> Iterator[Neighbour]:
    """Less at a time, as much more accumulation."""
    for micro_batch in smaller_sizes(config.micro_batch):
        accum = config.accum * config.micro_batch // micro_batch
        yield Neighbour(
            (f"micro_batch={micro_batch}", f"accum={accum}"),
            replace(config, micro_batch=micro_batch, accum=accum),
        )


def smaller_sizes(size: int) -> Iterator[int]:
    """Halves while there are any, then the divisors of what is odd: 30 -> 15, 5, 3, 1."""
    while size % 2 == 0:
        size //= 2
        yield size
    yield from (divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0)


def chunked_loss(config: Config) -> Iterator[Neighbour]:
    if config.loss.name == "full":
        changed = replace(config.loss, name="chunked")
        yield Neighbour(("loss=chunked",), replace(config, loss=changed))


def recomputes(config: Config) -> Iterator[Neighbour]:
    if config.checkpointing.policy != "segments":
        policy = replace(config.checkpointing, policy="segments")
        changed = replace(config, checkpoint_every=1, checkpointing=policy)
        yield Neighbour(("checkpointing=every_layer",), changed)
    elif segment_blocks(config) != 1:
        yield Neighbour(("checkpoint_every=1",), replace(config, checkpoint_every=1))


def offloads(config: Config) -> Iterator[Neighbour]:
    """More on the host, and for what is there already: less of it, or files."""
    modes: dict[OffloadMode, tuple[OffloadMode, ...]] = {
        "none": ("activations", "optimizer", "params", "all"),
        "activations": ("none", "optimizer", "all"),
        "optimizer": ("none", "optimizer_nvme", "params"),
        "params": ("optimizer", "params_nvme", "all"),
        "params_nvme": ("optimizer_nvme", "all_nvme"),
        "all": ("params", "all_nvme"),
    }
    for mode in modes.get(config.offload.mode, ()):
        yield Neighbour(
            (f"offload={mode}",), replace(config, offload=replace(config.offload, mode=mode))
        )
    if config.offload.mode in ("optimizer", "optimizer_nvme"):
        for share in (0.75, 0.5, 0.25):
            if share < config.offload.optimizer_fraction:
                changed = replace(config.offload, optimizer_fraction=share)
                override = f"offload.optimizer_fraction={share}"
                yield Neighbour((override,), replace(config, offload=changed))


def in_backward(config: Config) -> Iterator[Neighbour]:
    if not config.optimizer.in_backward:
        changed = replace(config.optimizer, in_backward=True)
        yield Neighbour(("optimizer.in_backward=true",), replace(config, optimizer=changed))


def precisions(config: Config) -> Iterator[Neighbour]:
    smaller: dict[str, tuple[Precision, ...]] = {
        "fp32": ("bf16", "bf16_true"),
        "bf16": ("bf16_true",),
    }
    for name in smaller.get(config.precision.name, ()):
        changed = replace(config, precision=replace(config.precision, name=name))
        yield Neighbour((f"precision={name}",), changed)


def merged(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """`overrides` without what `changes` sets anew, and `changes`, quoted for a shell where needed."""
    keys = {key for change in changes for key in keys_set(change)}
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in keys]
    return [shlex.quote(text) for text in (*kept, *changes)]


def keys_set(override: str) -> Iterator[str]:
    """Its key and, for a choice of a group, those of the group's file: typed as well, they would win over it."""
    key, _, choice = override.partition("=")
    yield key
    path = CONF_DIR / key / f"{choice}.yaml"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        package = "" if text.startswith("# @package _global_") else f"{key}."
        yield from leaf_keys(yaml.safe_load(text), package)


def leaf_keys(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
