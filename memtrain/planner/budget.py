"""A byte budget: what each block keeps, recomputes or offloads, so that the run fits and is fastest."""

from dataclasses import dataclass, replace

from memtrain.cards import Card
from memtrain.config import BlockPolicy, Config
from memtrain.errors import UserError
from memtrain.model.transformer import Dimensions
from memtrain.planner.predict import predict
from memtrain.planner.speed import estimate_speed
from memtrain.units import GIB, format_bytes

CHEAPEST_FIRST: tuple[BlockPolicy, ...] = ("keep", "selective", "offload", "recompute")
N_TRIES = 6


@dataclass(frozen=True)
class Outcome:
    """One choice for every block, planned."""

    per_block: tuple[BlockPolicy, ...]
    peak_bytes: int
    """Reserved on the device."""
    step_seconds: float


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what keeping everything would take."""

    per_block: tuple[BlockPolicy, ...]
    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    keep_peak_bytes: int
    keep_step_seconds: float


def choose(config: Config, dimensions: Dimensions, card: Card) -> Choice:
    """The fastest choice found that stays within `checkpointing.budget_gib`. Raises UserError if none does.

    Every uniform choice is planned; between them bytes and seconds per block are taken as linear, the best mixture is
    found by trying all counts, and then planned itself; what it takes too much or too little is asked for again.
    """
    limit_bytes = budget_bytes(config, card)
    n_layers = dimensions.n_layers
    uniform = {
        policy: outcome(config, dimensions, card, (policy,) * n_layers) for policy in CHEAPEST_FIRST
    }
    fitting = [found for found in uniform.values() if found.peak_bytes <= limit_bytes]
    wanted_bytes, fits_at, too_much_at = limit_bytes, 0, 0
    seen = {found.per_block for found in uniform.values()}
    for _ in range(N_TRIES):
        mixture = best_mixture(uniform, wanted_bytes, n_layers)
        if mixture is None or mixture in seen:
            break
        seen.add(mixture)
        found = outcome(config, dimensions, card, mixture)
        if found.peak_bytes <= limit_bytes:
            fitting.append(found)
            fits_at = wanted_bytes
        else:
            too_much_at = wanted_bytes
        wanted_bytes += limit_bytes - found.peak_bytes
        if fits_at and too_much_at:
            wanted_bytes = (fits_at + too_much_at) // 2
    if not fitting:
        smallest = min(uniform.values(), key=lambda found: found.peak_bytes)
        raise UserError(
            f"checkpointing.budget_gib: nothing fits {format_bytes(limit_bytes)}; the least is "
            f"{format_bytes(smallest.peak_bytes)} ({smallest.per_block[0]} in every block); "
            f"{advice(config)}"
        )
    best = min(fitting, key=lambda found: (found.step_seconds, found.peak_bytes))
    keep = uniform["keep"]
    return Choice(
        best.per_block,
        limit_bytes,
        best.peak_bytes,
        best.step_seconds,
        keep.peak_bytes,
        keep.step_seconds,
    )


def advice(config: Config) -> str:
    smaller = "lower micro_batch or seq_len" if config.micro_batch > 1 else "lower seq_len"
    return smaller if config.offload.mode == "optimizer" else f"{smaller}, or offload=optimizer"


def budget_bytes(config: Config, card: Card) -> int:
    given = config.checkpointing.budget_gib
    return card.memory_bytes - card.context_bytes if given == "fit" else int(float(given) * GIB)


def with_choice(config: Config, per_block: tuple[BlockPolicy, ...]) -> Config:
    """The same run with the choice spelled out."""
    spelled = replace(config.checkpointing, policy="per_block", per_block=list(per_block))
    return replace(config, checkpointing=spelled)


def outcome(
    config: Config, dimensions: Dimensions, card: Card, per_block: tuple[BlockPolicy, ...]
) -> Outcome:
    report = predict(with_choice(config, per_block), dimensions, card).report
    seconds = estimate_speed(report, card, config.precision.tf32, config.accum).step_seconds
    return Outcome(per_block, report.peak_reserved_bytes, seconds)


def best_mixture(
    uniform: dict[BlockPolicy, Outcome], limit_bytes: int, n_layers: int
) -> tuple[BlockPolicy, ...] | None:
    """Counts of each policy with the least time whose bytes, interpolated, stay within the limit.

    What is kept is kept in the last blocks: backward frees those first.
    """
    keep = uniform["keep"]
    per_block = {
        policy: (
            (found.peak_bytes - keep.peak_bytes) / n_layers,
            (found.step_seconds - keep.step_seconds) / n_layers,
        )
        for policy, found in uniform.items()
    }
    best: tuple[float, tuple[int, ...]] | None = None
    for counts in compositions(n_layers, len(CHEAPEST_FIRST)):
        pairs = [(n, *per_block[policy]) for n, policy in zip(counts, CHEAPEST_FIRST, strict=True)]
        if keep.peak_bytes + sum(n * size for n, size, _ in pairs) > limit_bytes:
            continue
        seconds = sum(n * cost for n, _, cost in pairs)
        if best is None or seconds < best[0]:
            best = (seconds, counts)
    if best is None:
        return None
    ordered = list(zip(best[1], CHEAPEST_FIRST, strict=True))[::-1]
    return tuple(policy for n, policy in ordered for _ in range(n))


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to split `total` blocks over `parts` policies."""
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(total + 1)
        for rest in compositions(total - first, parts - 1)
    ]
