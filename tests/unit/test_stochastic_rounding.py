"""Rounding up or down so that the mean is right."""

import math

import pytest
import torch

from memtrain.memory import stochastic_rounding
from memtrain.memory.stochastic_rounding import round_stochastically
from memtrain.phantom import PhantomGPU
from memtrain.units import MIB

BELOW_ONE = 2.0**-8
"""From 1 to the next smaller bf16."""


def rounded(source):
    target = torch.empty_like(source, dtype=torch.bfloat16)
    round_stochastically(target, source)
    return target


def bf16_neighbours(value):
    """The bf16 numbers around an fp32 one, by cutting its pattern, towards and away from zero."""
    cut = torch.tensor(value).view(torch.int32) & -65536
    return cut.view(torch.float32).item(), (cut + 65536).view(torch.float32).item()


@pytest.mark.parametrize("value", [1.001, -1.001, 0.1, -3.14159, 1e-20, 6.1e-40, 300.7, 0.99999])
def test_the_mean_is_the_value_and_only_neighbours_come(value):
    torch.manual_seed(0)
    n = 10**6
    value = torch.tensor(value).item()  # as fp32 holds it
    near, far = bf16_neighbours(value)
    draws = rounded(torch.full((n,), value)).double()
    assert set(draws.unique().tolist()) == {near, far}
    share = (value - near) / (far - near)
    sigma = abs(far - near) * math.sqrt(share * (1 - share) / n)
    assert abs(draws.mean().item() - value) < 5 * sigma


def test_what_bf16_holds_stays():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(torch.bfloat16)
    result = rounded(every.float())
    number = ~every.isnan()
    assert torch.equal(result.view(torch.int16)[number], patterns[number])  # signed zeros, too
    assert result[~number].isnan().all()


def test_what_is_not_finite_stays():
    smallest_nan, largest_nan = 0x7F800001, 0x7FFFFFFF
    nans = torch.tensor([smallest_nan, largest_nan, -1], dtype=torch.int32).view(torch.float32)
    for seed in range(20):
        torch.manual_seed(seed)
        assert rounded(nans).isnan().all()
        assert rounded(torch.tensor([math.inf, -math.inf])).tolist() == [math.inf, -math.inf]


def test_the_seed_decides():
    source = torch.randn(10_000)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(rounded(source))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_pieces_are_all_written(monkeypatch):
    """And a tensor shorter than a piece does not depend on how long that is."""
    monkeypatch.setattr(stochastic_rounding, "PIECE", 7)
    source = torch.randn(5, 6)
    result = rounded(source)
    assert result.shape == source.shape
    assert ((result.float() - source).abs() <= source.abs() * 2**-7).all()


def test_small_updates_move_a_weight_as_far_as_in_fp32():
    """1,000 updates by 1e-4 move 1 to 0.9; to the nearest bf16 each of them is rounded away."""
    torch.manual_seed(0)
    weight, plain = torch.ones(2**16, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        round_stochastically(weight, weight.float() - 1e-4)
        plain.copy_(plain.float() - 1e-4)
    assert plain.item() == 1.0
    share = 1e-4 / BELOW_ONE
    sigma = BELOW_ONE * math.sqrt(1000 * share * (1 - share) / weight.numel())
    assert abs(weight.double().mean().item() - 0.9) < 5 * sigma


def test_temporaries_are_those_of_one_piece():
    with PhantomGPU("a100_80gb") as gpu:
        source = torch.empty(2**25, device=gpu.device)
        target = torch.empty(2**25, device=gpu.device, dtype=torch.bfloat16)
        round_stochastically(target, source)
    beside = gpu.report().peak_allocated_bytes - source.nbytes - target.nbytes
    assert 0 < beside <= 48 * MIB
