"""A byte budget: the choice fits, is as fast as the best uniform one, and is the same every time."""

from dataclasses import asdict, replace
from itertools import product

import pytest

from memtrain.cards import load_card
from memtrain.engine.build import build_dimensions
from memtrain.errors import UserError
from memtrain.planner import budget
from memtrain.planner.budget import (
    CHEAPEST_FIRST,
    Outcome,
    choose,
    mixtures,
    outcome,
    with_choice,
)
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
    for share in (0.25, 0.75):
        limit_gib = (least + share * (keep - least)) / GIB
        tight = replace(wanted, checkpointing=replace(wanted.checkpointing, budget_gib=limit_gib))
        choice = choose(tight, dimensions, card)
        assert choice.peak_bytes <= limit_gib * GIB + 1
        best = min(o.step_seconds for o in found.values() if o.peak_bytes <= limit_gib * GIB + 1)
        assert choice.step_seconds <= 1.05 * best
        assert choice == choose(tight, dimensions, card)
        plan = make_plan(with_choice(tight, choice.per_block), dimensions, card)
        assert plan["peak_reserved_bytes"] == choice.peak_bytes


@pytest.mark.slow
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
        match=r"none of keep, selective, offload, recompute per block fits 512.00 MiB; the least is .* "
        r"lower micro_batch or seq_len, or offload=optimizer",
    ):
        choose(tight, dimensions, card)


def test_the_choice_in_words(case):
    wanted, dimensions, card = case
    kept = asdict(choose(wanted, dimensions, card))
    (line,) = choice_lines(kept)
    assert "everything is kept" in line
    lines = choice_lines(kept | {"per_block": ["recompute", *["keep"] * 5]})
    assert "recompute 0" in lines[0]
    assert "given up" in lines[1]
    assert runs(["keep", "keep", "offload"]) == ["keep 0-1", "offload 2"]


COSTS = {
    # bytes, host bytes, seconds in forward and backward, seconds of copies each way
    "keep": (100, 0, 1.0, 2.0, 0.0),
    "selective": (60, 0, 1.0, 2.4, 0.0),
    "offload": (10, 100, 1.0, 2.0, 2.0),
    "recompute": (10, 0, 1.0, 3.0, 0.0),
}


def simulated(config, dimensions, card, per_block):
    """A link that copies while the device computes, and one block too many unless the last one is kept."""
    costs = [COSTS[policy] for policy in per_block]
    peak, host, forward_s, backward_s, copy_s = (sum(column) for column in zip(*costs, strict=True))
    busy = ((forward_s, 0.0, 0.0, copy_s, 0.0), (backward_s, 0.0, copy_s, 0.0, 0.0))
    peak += 1000 + (0 if per_block[-1] == "keep" else 100)
    return Outcome(per_block, peak, host, sum(map(max, busy)), busy)


@pytest.fixture
def simulation(monkeypatch, case):
    """`choose` where planning is the sum above, within so many bytes."""
    wanted, dimensions, card = case
    monkeypatch.setattr(budget, "outcome", simulated)

    def chosen(limit_bytes, host_bytes=None):
        monkeypatch.setattr(budget, "budget_bytes", lambda config, card: limit_bytes)
        return choose(wanted, dimensions, card, host_bytes)

    return chosen


@pytest.mark.parametrize("limit_bytes", range(1150, 1600, 50))
def test_copies_that_computing_hides_are_used_and_no_more(simulation, limit_bytes):
    every = [simulated(None, None, None, blocks) for blocks in product(CHEAPEST_FIRST, repeat=6)]
    least = min(found.step_seconds for found in every if found.peak_bytes <= limit_bytes)
    choice = simulation(limit_bytes)
    assert choice.peak_bytes <= limit_bytes
    assert choice.step_seconds <= 1.01 * least
    assert choice == simulation(limit_bytes)


def test_host_memory_is_a_limit_as_well(simulation):
    assert "offload" in simulation(1300).per_block
    choice = simulation(1300, host_bytes=99)
    assert "offload" not in choice.per_block
    assert choice.peak_bytes <= 1300


def test_what_fits_with_the_last_block_kept_alone_is_found(simulation):
    assert simulation(1150).per_block[-1] == "keep"
    with pytest.raises(UserError):
        simulation(1149)


@pytest.mark.parametrize("n_layers", [1, 2, 47, 200, 10_000])
def test_a_deep_model_has_no_more_mixtures_to_weigh(n_layers):
    counts = mixtures(n_layers)
    assert len(counts) < 25_000
    assert set(counts.sum(1)) == {n_layers}
    assert counts.min() >= 0


def test_recomputed_blocks_whose_inputs_are_offloaded_are_named_where_they_fit(monkeypatch, case):
    """They take less than any choice per block."""
    wanted, dimensions, card = case
    monkeypatch.setattr(
        budget, "outcome", lambda *case: replace(simulated(*case), peak_bytes=100 * GIB)
    )
    small = replace(wanted, checkpointing=replace(wanted.checkpointing, budget_gib=3.0))
    with pytest.raises(
        UserError, match=r"; checkpoint_every=1 offload=activations instead .* fits"
    ):
        choose(small, dimensions, card)


@pytest.mark.slow
def test_a_last_block_that_is_kept_may_take_less_than_one_that_is_not(config):
    wanted = config(*SHAPE, "model.n_layers=4")
    dimensions, card = build_dimensions(wanted, 2048), load_card("a100_80gb")
    recompute, kept = (
        outcome(wanted, dimensions, card, ("recompute",) * 3 + last)
        for last in (("recompute",), ("keep",))
    )
    assert kept.peak_bytes < recompute.peak_bytes
    limit_gib = kept.peak_bytes / GIB
    tight = replace(wanted, checkpointing=replace(wanted.checkpointing, budget_gib=limit_gib))
    assert choose(tight, dimensions, card).peak_bytes <= kept.peak_bytes
