"""A byte budget: what each block keeps, recomputes or offloads, so that the run fits and is fastest."""

import math
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby

import numpy as np
from numpy.typing import NDArray

from memtrain.cards import Card
from memtrain.config import Config
from memtrain.config.tree import BlockPolicy, OffloadMode
from memtrain.errors import UserError
from memtrain.model.transformer import Dimensions
from memtrain.phantom import Report
from memtrain.planner.fit import is_valid
from memtrain.planner.predict import predict
from memtrain.planner.speed import busy_seconds, device_seconds, estimate_speed
from memtrain.units import GIB, format_bytes

CHEAPEST_FIRST: tuple[BlockPolicy, ...] = ("keep", "selective", "offload", "recompute")
N_TRIES = 6
N_CUTS = 48
"""Places at which one policy may follow another; a deeper model is cut at these alone."""
WORTH_A_TRY = 0.999
"""A mixture is planned if it is expected to take less than this share of the best one's time."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """One choice for every block, planned."""

    per_block: tuple[BlockPolicy, ...]
    peak_bytes: int
    """Reserved on the device."""
    host_bytes: int
    step_seconds: float
    busy: tuple[tuple[float, ...], ...]
    """Seconds of work in forward and in backward of all that works side by side: the longest is what passes."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what keeping everything would take."""

    per_block: tuple[BlockPolicy, ...]
    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    keep_peak_bytes: int
    keep_step_seconds: float


def choose(
    config: Config, dimensions: Dimensions, card: Card, host_bytes: int | None = None
) -> Choice:
    """The fastest choice found within `checkpointing.budget_gib` and, if given, `host_bytes` of host memory.

    Raises UserError if none is. Every uniform choice is planned, and with its last block kept; between them bytes and
    work per block are taken as linear. The mixture that promises most is planned and corrects the estimate near it,
    until none promises more.
    """
    limits = (budget_bytes(config, card), math.inf if host_bytes is None else host_bytes)
    planned = search(config, dimensions, card, limits)
    fitting = [found for found in planned if is_within(found, limits)]
    if not fitting:
        raise UserError(refusal(config, dimensions, card, planned, limits))
    best, keep = min(fitting, key=lambda found: (found.step_seconds, found.peak_bytes)), planned[0]
    return Choice(
        best.per_block,
        int(limits[0]),
        best.peak_bytes,
        best.step_seconds,
        keep.peak_bytes,
        keep.step_seconds,
    )


def search(
    config: Config, dimensions: Dimensions, card: Card, limits: tuple[float, float]
) -> list[Outcome]:
    """What was planned on the way to the fastest, beginning with `starts`."""
    planned: list[Outcome] = []
    for per_block in starts(dimensions.n_layers):
        planned.append(outcome(config, dimensions, card, per_block))
        if is_within(planned[0], limits):
            return planned  # nothing is faster than to keep everything
    for _ in range(N_TRIES):
        mixture = most_promising(planned, limits)
        if mixture is None:
            break
        planned.append(outcome(config, dimensions, card, mixture))
    return planned


def starts(n_layers: int) -> list[tuple[BlockPolicy, ...]]:
    """The uniform choices, then those that keep the last block: backward begins there, so it is freed first."""
    uniform = [(policy,) * n_layers for policy in CHEAPEST_FIRST]
    return uniform + [(*blocks[:-1], "keep") for blocks in uniform[1:]]


def is_within(found: Outcome, limits: tuple[float, float]) -> bool:
    return found.peak_bytes <= limits[0] and found.host_bytes <= limits[1]


def refusal(
    config: Config,
    dimensions: Dimensions,
    card: Card,
    planned: list[Outcome],
    limits: tuple[float, float],
) -> str:
    least = min(planned, key=lambda found: (found.host_bytes > limits[1], found.peak_bytes))
    least_host_bytes = least.host_bytes if math.isfinite(limits[1]) else math.inf
    return (
        f"checkpointing.budget_gib: none of {', '.join(CHEAPEST_FIRST)} per block fits "
        f"{in_words(*limits)}; the least is {in_words(least.peak_bytes, least_host_bytes)} "
        f"({', '.join(f'{policy} x {len(list(run))}' for policy, run in groupby(least.per_block))}); "
        f"{recomputed_offload(config, dimensions, card, limits) or advice(config)}"
    )


def in_words(device_bytes: float, host_bytes: float) -> str:
    """Infinite host memory is none that counts."""
    on_device = format_bytes(int(device_bytes))
    if math.isinf(host_bytes):
        return on_device
    return f"{on_device} with {format_bytes(int(host_bytes))} of host memory"


def recomputed_offload(
    config: Config, dimensions: Dimensions, card: Card, limits: tuple[float, float]
) -> str:
    """What takes less than any choice per block, if it fits: blocks recomputed from inputs that are offloaded."""
    modes: dict[OffloadMode, OffloadMode] = {
        "none": "activations",
        "params": "all",
        "params_nvme": "all_nvme",
    }
    mode = modes.get(config.offload.mode)
    if mode is None:
        return ""
    segments = replace(config.checkpointing, policy="segments")
    offload = replace(config.offload, mode=mode)
    changed = replace(config, checkpoint_every=1, checkpointing=segments, offload=offload)
    if not is_valid(changed):
        return ""
    report = predict(changed, dimensions, card).report
    if report.peak_reserved_bytes > limits[0] or report.host_peak_bytes > limits[1]:
        return ""
    return (
        f"checkpoint_every=1 offload={mode} instead of checkpointing=budget fits: "
        f"{in_words(report.peak_reserved_bytes, report.host_peak_bytes)}"
    )


def advice(config: Config) -> str:
    smaller = "lower micro_batch or seq_len" if config.micro_batch > 1 else "lower seq_len"
    return smaller if config.offload.mode != "none" else f"{smaller}, or offload=optimizer"


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
    tf32 = config.precision.tf32
    return Outcome(
        per_block,
        report.peak_reserved_bytes,
        report.host_peak_bytes,
        estimate_speed(report, card, tf32, config.accum).step_seconds,
        tuple(side_by_side(report, phase, card, tf32) for phase in ("forward", "backward")),
    )


def side_by_side(report: Report, phase: str, card: Card, tf32: bool) -> tuple[float, ...]:
    """Seconds of work of device, host, each way of the link, and files; each grows with the blocks that cause it."""
    busy = busy_seconds(report.ops, phase, card, tf32)
    ways = [[op for op in report.ops if op.kind == way] for way in ("h2d", "d2h")]
    links = [busy_seconds(ops, phase, card, tf32)["host link"] for ops in ways]
    host_s, files_s = busy["host"], busy["files"]
    if phase == "forward":  # the host's step, counted as such
        host_s, files_s = 0.0, max(0.0, files_s - 2 * busy["writes"])
    return (device_seconds(busy), host_s, *links, files_s)


def most_promising(
    planned: list[Outcome], limits: tuple[float, float]
) -> tuple[BlockPolicy, ...] | None:
    """The mixture expected to fit and to be fastest, or None if what fits already is as fast.

    What the estimate was wrong by for the nearest mixture that was planned is put right.
    """
    counts = mixtures(len(planned[0].per_block))
    known = np.array([[p.per_block.count(policy) for policy in CHEAPEST_FIRST] for p in planned])
    figures = np.array([(p.peak_bytes, p.host_bytes, p.step_seconds) for p in planned])
    distances = np.stack([np.abs(counts - one).sum(1) for one in known], 1)
    wrong_by = figures - estimates(known, planned)
    expected = estimates(counts, planned) + wrong_by[distances.argmin(1)]
    best_s = min((p.step_seconds for p in planned if is_within(p, limits)), default=math.inf)
    promising = (expected[:, :2] <= limits).all(1) & (distances.min(1) > 0)
    promising &= expected[:, 2] < WORTH_A_TRY * best_s
    if not promising.any():
        return None
    fastest = np.where(promising, expected[:, 2], math.inf).argmin()
    in_order = list(zip(counts[fastest], CHEAPEST_FIRST, strict=True))[::-1]
    return tuple(policy for n, policy in in_order for _ in range(n))


def estimates(counts: NDArray[np.int64], planned: list[Outcome]) -> Array:
    """Peak on the device, host bytes and seconds of each mixture, from the `starts` it lies between."""
    n_layers, n_policies = len(planned[0].per_block), len(CHEAPEST_FIRST)
    uniform, last_kept = planned[:n_policies], planned[n_policies : 2 * n_policies - 1]
    free = counts - (np.arange(n_policies) == 0)  # but for the last block, which is kept
    return np.where(
        counts[:, :1] > 0,
        between(free / max(1, n_layers - 1), [planned[0], *last_kept]),
        between(counts / n_layers, uniform),
    )


def between(shares: Array, ends: list[Outcome]) -> Array:
    """`estimates` where each of `ends` has a share: bytes and work are linear, of what works side by side the longest
    passes."""
    busy = np.array([end.busy for end in ends])
    rest_s = np.array([end.step_seconds for end in ends]) - busy.max(2).sum(1)
    passed_s = np.tensordot(shares, busy, 1).max(2).sum(1)
    sizes = np.array([(end.peak_bytes, end.host_bytes) for end in ends])
    return np.column_stack((shares @ sizes, passed_s + shares @ rest_s))


def mixtures(n_layers: int) -> NDArray[np.int64]:
    """How many blocks have each policy, in every way to cut the model in four.

    Recomputed blocks come first, kept ones last: backward frees those first.
    """
    cuts = {round(n_layers * i / N_CUTS) for i in range(N_CUTS + 1)} | {n_layers - 1}
    inner = np.array(list(combinations_with_replacement(sorted(cuts), len(CHEAPEST_FIRST) - 1)))
    return np.diff(inner, axis=1, prepend=0, append=n_layers)[:, ::-1]
