"""The 8-bit optimizer takes what it says, and says what stays at 32 bits."""

from collections.abc import Callable

import pytest
import torch

from memtrain.engine.optimizers import make_optimizer, state_bytes_per_parameter

pytest.importorskip("bitsandbytes")
SETTINGS: dict = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.0, "implementation": "fused"
}  # fmt: skip


def size(name: str, n: int) -> tuple[float, float]:
    """(bytes of state per parameter, share that stays 32-bit) of one weight of `n` elements."""
    weight = torch.nn.Parameter(torch.ones(1, n))
    make: Callable = make_optimizer
    optimizer = make(name, [{"params": [weight], "lr": 1e-3, "weight_decay": 0.0}], **SETTINGS)
    weight.grad = torch.ones_like(weight)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    return tuple(state_bytes_per_parameter(optimizer.state.items()))


def test_a_large_and_a_small_weight() -> None:
    plain, _ = size("adamw", 2**20)
    eight, share = size("adamw_8bit", 2**20)
    assert plain == pytest.approx(8.0, abs=1e-4)
    assert eight == pytest.approx(2 * (1 + 4 / 256), abs=0.01)
    assert plain / eight > 3.9 and share == 0
    small, share = size("adamw_8bit", 4095)
    assert (small, share) == (8.0, 1.0)
