"""Roofline (Williams et al. 2009): how long a step takes if every operator runs at the card's limits."""

from dataclasses import dataclass

from memtrain.cards import Card
from memtrain.phantom import OpUse, Report

HOST_BANDWIDTH_GB_S = 40.0
"""What a host's memory gives an optimizer step: dual-channel DDR5, about half of its data sheet."""
OVERLAPPED = ("forward", "backward")
"""Phases in which transfers run beside the computation, on streams of their own."""
_PEAKS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    parts: dict[str, float]
    """Seconds by what limits them: matrix products, memory, host link (what is not hidden), host."""

    @property
    def limited_by(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def estimate_speed(report: Report, card: Card, tf32: bool) -> Speed:
    """The last step's operators one after the other; in forward and backward, transfers beside them."""
    parts = {"matrix products": 0.0, "memory": 0.0, "host link": 0.0, "host": 0.0}
    for phase in sorted({op.phase for op in report.ops}):
        ops = [op for op in report.ops if op.phase == phase]
        ways = link_seconds(ops, card)
        computing_s = 0.0
        for op in ops:
            part, seconds = operator_seconds(op, card, tf32)
            parts[part] += seconds
            computing_s += seconds
        if phase in OVERLAPPED:  # both ways at once, beside the computation
            parts["host link"] += max(0.0, max(ways) - computing_s)
        else:
            parts["host link"] += sum(ways)
    return Speed(sum(parts.values()), parts)


def link_seconds(ops: list[OpUse], card: Card) -> tuple[float, float]:
    """To the device and from it."""
    to_device, from_device = (
        sum(op.moved_bytes for op in ops if op.kind == way) / (card.link_gb_s * 1e9)
        for way in ("h2d", "d2h")
    )
    return to_device, from_device


def operator_seconds(op: OpUse, card: Card, tf32: bool) -> tuple[str, float]:
    """(what limits it, seconds); transfers are the link's."""
    if op.kind in ("h2d", "d2h"):
        return "host link", 0.0
    if not op.on_device:
        return "host", op.moved_bytes / (HOST_BANDWIDTH_GB_S * 1e9)
    memory_s = op.moved_bytes / (card.bandwidth_gb_s * 1e9)
    compute_s = op.flops / (compute_tflops(op.dtype, card, tf32) * card.efficiency * 1e12)
    return max(("matrix products", compute_s), ("memory", memory_s), key=lambda item: item[1])


def compute_tflops(dtype: str, card: Card, tf32: bool) -> float:
    """The card's dense peak for matrix products of `dtype`; what it lacks runs as fp32."""
    kind = _PEAKS.get(dtype, "tf32" if tf32 else "fp32")
    return card.peak_tflops(kind) or card.fp32_tflops
