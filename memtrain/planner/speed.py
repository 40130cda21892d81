"""Roofline (Williams et al. 2009): how long a step takes if every operator runs at the card's limits."""

from dataclasses import dataclass

from memtrain.cards import Card
from memtrain.phantom import OpUse, Report

NVME_BANDWIDTH_GB_S = 5.0
"""Estimate: what files move, reads and writes together, on an NVMe SSD on PCIe 4.0 x4.

The link ends at 7.9 GB/s, data sheets say 5 to 7 while the SSD's fast cache lasts; a write that goes on is slower.
"""
HOST_TFLOPS = 1.0
"""Estimate: what a host's cores make of matrix products in fp32 (muon's, off the device)."""
PHASES = ("forward", "backward", "optimizer", "other")
_PEAKS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    parts: dict[str, float]
    """Seconds by what limits them: matrix products, memory, host; host link and files by what nothing else hides."""

    @property
    def limited_by(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def estimate_speed(report: Report, card: Card, tf32: bool, accum: int = 1) -> Speed:
    """The last step's operators, one after the other on each of device, link, host and files.

    In forward and backward these four work beside each other. So they do in the host's step, which runs beside the
    forward pass of the first of `accum` micro-batches as well: its blocks wait for their weights one by one.
    """
    busy = {phase: busy_seconds(report.ops, phase, card, tf32) for phase in PHASES}
    forward, backward, step = busy["forward"], busy["backward"], busy["optimizer"]
    for part, seconds in busy["other"].items():
        step[part] += seconds
    # The host steps what forward is about to read: of the files there, as much is read for that as is written.
    state_files_s = min(forward["files"], 2 * forward.pop("writes"))
    step["host"], forward["host"] = step["host"] + forward["host"], 0.0
    step["files"], forward["files"] = (
        step["files"] + state_files_s,
        forward["files"] - state_files_s,
    )
    parts = dict.fromkeys(("matrix products", "memory", "host link", "host", "files"), 0.0)
    first_forward_s = device_seconds(forward) / accum if step["host"] else 0.0
    for stretch, hidden_s in (
        (forward, device_seconds(forward)),
        (backward, device_seconds(backward)),
        (step, first_forward_s),
    ):
        for part, seconds in exposed(stretch, hidden_s).items():
            parts[part] += seconds
    return Speed(sum(parts.values()), parts)


def busy_seconds(ops: list[OpUse], phase: str, card: Card, tf32: bool) -> dict[str, float]:
    """Seconds of work for each part in one phase; the link carries both ways at once."""
    busy = dict.fromkeys(("matrix products", "memory", "h2d", "d2h", "host"), 0.0)
    busy |= {"nvme_read": 0.0, "nvme_write": 0.0}
    for op in ops:
        if op.phase == phase:
            part, seconds = operator_seconds(op, card, tf32)
            busy[part] += seconds
    busy["host link"] = max(busy.pop("h2d"), busy.pop("d2h"))
    busy["writes"] = busy.pop("nvme_write")
    busy["files"] = busy.pop("nvme_read") + busy["writes"]
    return busy


def device_seconds(busy: dict[str, float]) -> float:
    return busy["matrix products"] + busy["memory"]


def exposed(busy: dict[str, float], hidden_s: float) -> dict[str, float]:
    """What each part adds to a stretch of which `hidden_s` pass anyway: the device all, the rest what is left of it."""
    found = {part: busy[part] for part in ("matrix products", "memory")}
    for part in ("host", "host link", "files"):
        found[part] = max(0.0, busy[part] - hidden_s)
        hidden_s += found[part]
    return found


def operator_seconds(op: OpUse, card: Card, tf32: bool) -> tuple[str, float]:
    """(what it keeps busy, seconds); files are read and written through the same connection."""
    if op.kind in ("h2d", "d2h"):
        return op.kind, op.moved_bytes / (card.link_gb_s * 1e9)
    if op.kind in ("nvme_read", "nvme_write"):
        return op.kind, op.moved_bytes / (NVME_BANDWIDTH_GB_S * 1e9)
    if not op.on_device:
        moving_s = op.moved_bytes / (card.host_bandwidth_gb_s * 1e9)
        return "host", max(moving_s, op.flops / (HOST_TFLOPS * 1e12))
    memory_s = op.moved_bytes / (card.bandwidth_gb_s * 1e9)
    compute_s = op.flops / (compute_tflops(op.dtype, card, tf32) * card.efficiency * 1e12)
    return max(("matrix products", compute_s), ("memory", memory_s), key=lambda item: item[1])


def compute_tflops(dtype: str, card: Card, tf32: bool) -> float:
    """The card's dense peak for matrix products of `dtype`; what it lacks runs as fp32."""
    kind = _PEAKS.get(dtype, "tf32" if tf32 else "fp32")
    return card.peak_tflops(kind) or card.fp32_tflops
