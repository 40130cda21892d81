"""Roofline (Williams et al. 2009): how long a step takes if every operator runs at the card's limits."""

from collections.abc import Iterable
from dataclasses import dataclass

from memtrain.cards import Card
from memtrain.phantom import OpUse, Report

HOST_BANDWIDTH_GB_S = 40.0
"""What a host's memory gives an optimizer step: dual-channel DDR5, about half of its data sheet."""
_PEAKS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Speed:
    step_seconds: float
    parts: dict[str, float]
    """Seconds by what limits them: matrix products, memory, host link, host."""

    @property
    def limited_by(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def estimate_speed(report: Report, card: Card, tf32: bool) -> Speed:
    """The last step's operators one after the other, transfers and host work not overlapped."""
    parts = {"matrix products": 0.0, "memory": 0.0, "host link": 0.0, "host": 0.0}
    for part, seconds in operator_seconds(report.ops, card, tf32):
        parts[part] += seconds
    parts["host link"] = (report.h2d_bytes + report.d2h_bytes) / (card.link_gb_s * 1e9)
    return Speed(sum(parts.values()), parts)


def operator_seconds(ops: Iterable[OpUse], card: Card, tf32: bool) -> Iterable[tuple[str, float]]:
    """(what limits it, seconds) of every operator."""
    for op in ops:
        if not op.on_device:
            yield "host", op.moved_bytes / (HOST_BANDWIDTH_GB_S * 1e9)
            continue
        memory_s = op.moved_bytes / (card.bandwidth_gb_s * 1e9)
        compute_s = op.flops / (compute_tflops(op.dtype, card, tf32) * card.efficiency * 1e12)
        yield max(("matrix products", compute_s), ("memory", memory_s), key=lambda item: item[1])


def compute_tflops(dtype: str, card: Card, tf32: bool) -> float:
    """The card's dense peak for matrix products of `dtype`; what it lacks runs as fp32."""
    kind = _PEAKS.get(dtype, "tf32" if tf32 else "fp32")
    return card.peak_tflops(kind) or card.fp32_tflops
