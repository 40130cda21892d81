"""A GPU's data sheet: what `conf/gpu/*.yaml` holds, readable without Hydra."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from memtrain.units import MIB

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = None if (PACKAGE / "conf").is_dir() else PACKAGE.parent
"""The folder that has conf/ at its top; None: conf/ came with an installed package."""
CONF_DIR = (CHECKOUT or PACKAGE) / "conf"
CARDS_DIR = CONF_DIR / "gpu"
PROGRAM = "python train.py" if CHECKOUT else "memtrain"
"""What is typed."""


@dataclass(frozen=True)
class Card:
    """One GPU as its vendor describes it. TFLOPS are dense (no sparsity); 0 means the card cannot."""

    name: str
    """As plans show it."""
    memory_mib: int
    """What CUDA reports as total memory: a little less than nvidia-smi does."""
    bandwidth_gb_s: float
    """Of the memory."""
    fp32_tflops: float
    """Without tensor cores."""
    tf32_tflops: float
    """Of tensor cores."""
    fp16_tflops: float
    """Of tensor cores, summed in fp32."""
    bf16_tflops: float
    """Of tensor cores."""
    fp8_tflops: float
    """Of tensor cores."""
    link_gb_s: float
    """Host link, one direction, of the data sheet (PCIe 4.0 x16: 32)."""
    host_bandwidth_gb_s: float
    """Estimate: what the memory of a typical host of this card gives an optimizer step, about half of its data sheet.

    Half, because a step streams several tensors both ways from a few cores. The host is not the card's: a machine with
    fewer memory channels in use is slower.
    """
    compute_capability: float
    """CUDA's, such as 8.9."""
    context_mib: int
    """What a CUDA context holds outside the allocator."""
    workspace_mib: float
    """One cuBLAS workspace; there is one per handle and stream."""
    efficiency: float
    """Share of the dense peak that large matrix products reach in practice."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def context_bytes(self) -> int:
        return self.context_mib * MIB

    @property
    def workspace_bytes(self) -> int:
        return int(self.workspace_mib * MIB)

    def peak_tflops(self, precision: str) -> float:
        """Dense peak for matrix products of `precision` (fp32, tf32, fp16, bf16, fp8), in TFLOPS."""
        value: float = getattr(self, f"{precision}_tflops")
        return value


def load_yaml(path: Path) -> dict[str, Any]:
    """One of our own files, by libyaml where that is there: ten times as fast."""
    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values: dict[str, Any] = safe(path.read_text(encoding="utf-8")).get_single_data()
    return values


def missing_type(card: Card, precision: str, tf32: bool) -> str | None:
    """One line on what `precision` (of conf/precision) or TF32 asks of a card that has no hardware for it."""
    kind = precision.removesuffix("_true")
    if kind != "fp32" and not card.peak_tflops(kind):
        instead = "fp16" if card.fp16_tflops else "fp32"
        return (
            f"precision={precision}: the {card.name} has no {kind}; what emulates it is no faster "
            f"than fp32: precision={instead} is for that card"
        )
    if kind == "fp32" and tf32 and not card.tf32_tflops:
        return f"precision.tf32=true has no effect: the {card.name} has no TF32"
    return None


def card_names() -> list[str]:
    """The cards that have a file; `auto` is a choice, not a card."""
    return sorted(path.stem for path in CARDS_DIR.glob("*.yaml") if path.stem != "auto")


def load_card(name: str) -> Card:
    """Read `conf/gpu/<name>.yaml`. Raises ValueError for a name without a file."""
    path = CARDS_DIR / f"{name}.yaml"
    if name not in card_names():
        raise ValueError(f"unknown GPU {name!r}: choose one of {', '.join(card_names())}")
    values = load_yaml(path)
    return Card(**{field.name: values[field.name] for field in fields(Card)})


VARIANTS = ("Ti", "SUPER", "Laptop", "D", "NVL")
"""Words that make another card of the same number."""

SXM_ALONE = ("A100 80GB", "H100 80GB", "V100 16GB", "V100 32GB")
"""Data sheets of an SXM card whose PCIe sister is slower."""


def match_card(device_name: str, memory_bytes: int) -> Card | None:
    """The card whose model number occurs in what the driver calls the device; the nearest memory decides.

    None for a slice of a card (MIG), and for a sister of other speed.
    """
    words = re.split(r"[\s-]+", device_name)
    if "MIG" in words:
        return None
    cards = [
        card
        for card in map(load_card, card_names())
        if model_number(card) in words
        and all((word in words) == (word in card.name.split()) for word in VARIANTS)
    ]
    nearest = min(cards, key=lambda card: abs(card.memory_bytes - memory_bytes), default=None)
    if nearest and nearest.name in SXM_ALONE and "PCIE" in device_name.upper():
        return None
    return nearest


def model_number(card: Card) -> str:
    """`RTX 4090 -> 4090`, `A100 80GB -> A100`."""
    return next(word for word in card.name.split() if any(letter.isdigit() for letter in word))
