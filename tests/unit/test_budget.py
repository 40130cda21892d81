"""A byte budget: the choice fits, is as fast as the best uniform one, and is the same every time."""

from dataclasses import asdict, replace

import pytest

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.planner.budget import CHEAPEST_FIRST, choose, outcome, with_choice
from memtrain.planner.predict import make_plan
from memtrain.report.planned import choice_lines, runs
from memtrain.units import GIB, MIB

SHAPE = (
    "model=small",
    "model.n_layers=6",
    "micro_batch=4",
    "seq_len=1024",
    "precision=bf16",
    "checkpointing=budget",
)


@pytest.fixture
def case(config):
    wanted = config(*SHAPE)
    return wanted, build_dimensions(wanted, 2048), load_card("a100_80gb")


@pytest.mark.slow
def test_the_choice_fits_and_is_as_fast_as_the_best_uniform_one(case):
    wanted, dimensions, card = case
    found = {policy: outcome(wanted, dimensions, card, (policy,) * 6) for policy in CHEAPEST_FIRST}
    keep, least = found["keep"].peak_bytes, min(one.peak_bytes for one in found.values())
    for share in (0.25, 0.5, 0.75, 1.0):
        limit_gib = (least + share * (keep - least)) / GIB
        tight = replace(wanted, checkpointing=replace(wanted.checkpointing, budget_gib=limit_gib))
        choice = choose(tight, dimensions, card)
        assert choice.peak_bytes <= limit_gib * GIB + 1
        best = min(o.step_seconds for o in found.values() if o.peak_bytes <= limit_gib * GIB + 1)
        assert choice.step_seconds <= 1.05 * best
        assert choice == choose(tight, dimensions, card)
        plan = make_plan(with_choice(tight, choice.per_block), dimensions, card)
        assert plan["peak_reserved_bytes"] == choice.peak_bytes


def test_what_the_card_has_is_the_default(case):
    wanted, dimensions, card = case
    assert choose(wanted, dimensions, card).per_block == ("keep",) * 6
    keep = choose(wanted, dimensions, card).peak_bytes
    small = replace(card, memory_mib=int(0.9 * keep) // MIB, context_mib=0)
    assert set(choose(wanted, dimensions, small).per_block) != {"keep"}


def test_nothing_fits(case):
    wanted, dimensions, card = case
    tight = replace(wanted, checkpointing=replace(wanted.checkpointing, budget_gib=0.5))
    with pytest.raises(
        UserError,
        match=r"nothing fits 512.00 MiB; the least is .* lower micro_batch or seq_len, or offload=optimizer",
    ):
        choose(tight, dimensions, card)


def test_the_choice_in_words(case):
    wanted, dimensions, card = case
    lines = choice_lines(asdict(choose(wanted, dimensions, card)))
    assert "keep 0-5" in lines[0]
    assert "given up" in lines[1]
    assert runs(["keep", "keep", "offload"]) == ["keep 0-1", "offload 2"]
