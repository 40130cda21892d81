"""What adapters save, by the phantom: the figures that docs/fine-tune.md states."""

from collections.abc import Callable

import pytest

from memtrain.cards import load_card
from memtrain.config import Config
from memtrain.engine.build import build_dimensions
from memtrain.planner.predict import make_plan
from memtrain.units import GIB

pytest.importorskip("bitsandbytes")

PLAIN = ("task=plan", "precision=bf16", "checkpoint_every=1", "seq_len=2048", "micro_batch=1")
SIXTY_FIVE = ("model=llama2_70b", "model.n_kv_heads=64", "model.ffn_dim=22016")


def plan(config: Callable[..., Config], card: str, *overrides: str) -> dict[str, float]:
    wanted = config(*PLAIN, *overrides)
    return make_plan(wanted, build_dimensions(wanted, 300), load_card(card))


def test_a_frozen_base_needs_no_gradients_and_four_bits_need_less(config) -> None:
    small = ("model=small", "seq_len=512")
    full, lora, qlora = (
        plan(config, "l4", *small, f"adapter={name}")["peak_allocated_bytes"]
        for name in ("none", "lora", "qlora")
    )
    assert lora < 0.4 * full
    assert qlora < 0.8 * lora


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "overrides", "gib"),
    [
        ("rtx3060_12gb", ("model=llama2_7b", "adapter=qlora"), 5.15),
        ("rtx3060_12gb", ("model=llama2_7b", "adapter=qlora", "offload=activations"), 4.8),
        ("a6000", ("model=llama2_70b", "adapter=qlora"), 40.2),
        ("rtx4090", (*SIXTY_FIVE, "adapter=qlora", "offload=params"), 4.6),
    ],
)
def test_large_bases_fit_small_cards(config, card, overrides, gib) -> None:
    found = plan(config, card, *overrides)
    assert found["fits"]
    assert found["peak_allocated_bytes"] <= gib * GIB
