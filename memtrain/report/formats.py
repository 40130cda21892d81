"""Number formats and what they do to a model's gradients: ranges, histograms, underflow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

Gradients = Mapping[str, Tensor | NDArray[Any]]

CHUNK = 2**20
"""Elements looked at together: what bounds the memory taken."""

LAYER_KINDS = {
    "norm": "norm",
    "ln_": "norm",
    "emb": "embedding",
    "wte": "embedding",
    "wpe": "embedding",
    "positions": "embedding",
    "attn": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "ffn": "mlp",
    "feed_forward": "mlp",
    "head": "head",
}
"""Part of a parameter's name -> kind of layer; the first that occurs decides."""

LOG2_RANGE = (-149, 128)
"""Every finite non-zero fp32 lies in [2**-149, 2**128)."""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format, all of it derived from its two field widths.

    `infinities`: the top exponent holds inf and NaN as in IEEE 754. Without (E4M3 "fn" of
    arXiv:2209.05433) it holds numbers too, and only the all-ones pattern is NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True

    @property
    def bits(self) -> int:
        """Bits that carry information: 19 for tf32, which is kept in 32."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        top = int(2**self.exponent_bits) - (2 if self.infinities else 1)
        unused = 1 if self.infinities else 2
        return math.ldexp(2 - unused * self.epsilon, top - self.bias)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """From 1 to the next number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def decimal_digits(self) -> int:
        """Decimal digits that survive in every number (C's `FLT_DIG`)."""
        return math.floor(self.mantissa_bits * math.log10(2))


def float_formats() -> list[FloatFormat]:
    """The formats of training, widest first."""
    return [
        FloatFormat("fp32", 8, 23),
        FloatFormat("tf32", 8, 10),
        FloatFormat("fp16", 5, 10),
        FloatFormat("bf16", 8, 7),
        FloatFormat("fp8 E4M3", 4, 3, infinities=False),
        FloatFormat("fp8 E5M2", 5, 2),
    ]


@dataclass
class GradientHistogram:
    """log2 |g| of one kind of layer."""

    edges: NDArray[np.float64]  # (bins + 1,)
    counts: NDArray[np.int64]  # (bins,)
    zeros: int = 0
    not_finite: int = 0

    @property
    def total(self) -> int:
        return int(self.counts.sum()) + self.zeros + self.not_finite

    def add(self, values: Tensor) -> None:
        """Count `values` (any shape, fp32)."""
        finite = values[values.isfinite()].double()
        size = finite[finite != 0].abs().log2()
        self.counts += np.histogram(size.numpy(), self.edges)[0]
        self.zeros += int((finite == 0).sum())
        self.not_finite += values.numel() - finite.numel()

    def quantile(self, share: float) -> float:
        """log2 |g| below which `share` (0..1) of the non-zero gradients lie; NaN without any."""
        if not self.counts.sum():
            return math.nan
        cumulative = np.concatenate([[0], self.counts.cumsum()]) / self.counts.sum()
        return float(np.interp(share, cumulative, self.edges))


def layer_kind(name: str, kinds: Mapping[str, str] = LAYER_KINDS) -> str:
    """The kind of layer a parameter belongs to, by its name; `other` if nothing matches."""
    return next((kind for part, kind in kinds.items() if part in name), "other")


def gradient_histograms(
    grads: Gradients, bins: int = 277, kinds: Mapping[str, str] = LAYER_KINDS
) -> dict[str, GradientHistogram]:
    """Histogram of log2 |g| for each kind of layer, `bins` equal ones over the range of fp32.

    The default is one bin per power of two. Zeros and values that are not finite are counted apart.
    """
    edges = np.linspace(*LOG2_RANGE, bins + 1)
    histograms: dict[str, GradientHistogram] = {}
    for name, grad in grads.items():
        kind = layer_kind(name, kinds)
        empty = GradientHistogram(edges, np.zeros(bins, np.int64))
        histogram = histograms.setdefault(kind, empty)
        for values in chunks(grad):
            histogram.add(values)
    return histograms


@dataclass
class Shares:
    """What a cast to `format` of gradients times `loss_scale` does to the non-zero ones."""

    format: str
    dtype: torch.dtype = field(repr=False)
    loss_scale: float
    total: int = 0
    underflowed: int = 0
    overflowed: int = 0

    @property
    def underflow(self) -> float:
        """Share that becomes zero, 0..1; NaN without any gradient."""
        return self.underflowed / self.total if self.total else math.nan

    @property
    def overflow(self) -> float:
        """Share that becomes inf or NaN, 0..1; NaN without any gradient."""
        return self.overflowed / self.total if self.total else math.nan

    def add(self, values: Tensor) -> None:
        """Cast `values` (finite, not zero, fp32) and count."""
        cast = (values * self.loss_scale).to(self.dtype).float()
        self.total += values.numel()
        self.underflowed += int((cast == 0).sum())
        self.overflowed += values.numel() - int(cast.isfinite().sum())


def underflow_shares(grads: Gradients, loss_scale: float) -> list[Shares]:
    """What fp16 and fp8 E5M2 lose of the gradients, without and with `loss_scale`.

    `grads` are unscaled; those that are zero or not finite are left out. Casts round to nearest
    and do not saturate.
    """
    casts = {"fp16": torch.float16, "fp8 E5M2": torch.float8_e5m2}
    shares = [Shares(n, dtype, scale) for n, dtype in casts.items() for scale in (1.0, loss_scale)]
    for grad in grads.values():
        for values in chunks(grad):
            nonzero = values[values.isfinite() & (values != 0)]
            for share in shares:
                share.add(nonzero)
    return shares


def chunks(grad: Tensor | NDArray[Any]) -> Iterator[Tensor]:
    """`grad` as flat fp32 pieces on the host. (<= CHUNK,)"""
    for piece in torch.as_tensor(grad).detach().reshape(-1).split(CHUNK):  # type: ignore[no-untyped-call]
        yield piece.to("cpu", torch.float32)


def formats_table(formats: Sequence[FloatFormat]) -> Table:
    """The formats for the console."""
    table = Table(title="Number formats")
    table.add_column("format")
    for name in ("bits", "exponent", "mantissa", "largest", "smallest normal"):
        table.add_column(name, justify="right")
    for name in ("smallest subnormal", "epsilon", "decimal digits"):
        table.add_column(name, justify="right")
    for form in formats:
        widths = (form.bits, form.exponent_bits, form.mantissa_bits)
        ranges = (form.largest, form.smallest_normal, form.smallest_subnormal, form.epsilon)
        numbers = (f"{value:.5g}" for value in ranges)
        table.add_row(form.name, *map(str, widths), *numbers, str(form.decimal_digits))
    return table


def histograms_table(histograms: Mapping[str, GradientHistogram]) -> Table:
    """Where each kind of layer's gradients lie: quantiles of |g| as powers of two."""
    table = Table(title="Gradients: |g| as a power of two")
    table.add_column("layers")
    for name in ("elements", "zero", "not finite", "1 %", "median", "99 %"):
        table.add_column(name, justify="right")
    for kind, histogram in histograms.items():
        quantiles = (f"2^{histogram.quantile(share):.1f}" for share in (0.01, 0.5, 0.99))
        zero = f"{histogram.zeros / max(histogram.total, 1):.2%}"
        table.add_row(kind, str(histogram.total), zero, str(histogram.not_finite), *quantiles)
    return table


def shares_table(shares: Sequence[Shares]) -> Table:
    """What the casts lose, for the console."""
    table = Table(title="Non-zero gradients lost by a cast")
    table.add_column("format")
    for name in ("loss scale", "become zero", "overflow"):
        table.add_column(name, justify="right")
    for share in shares:
        lost = (f"{share.underflow:.4%}", f"{share.overflow:.4%}")
        table.add_row(share.format, f"{share.loss_scale:g}", *lost)
    return table
