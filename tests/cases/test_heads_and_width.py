"""Heads that do not divide the width are refused, naming both, also where assert does nothing (python -O)."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from command import ROOT

from memtrain.config import Config
from memtrain.errors import UserError

REASONS = {
    ("model.dim=100", "model.n_heads=3"): "model.dim=100: not divisible by model.n_heads=3",
    ("model.n_heads=0",): "model.n_heads=0: must be at least 1",
    ("model.n_heads=-2",): "model.n_heads=-2: must be at least 1",
}


@pytest.mark.parametrize(("overrides", "reason"), REASONS.items())
def test_refused(tiny: Callable[..., Config], overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        tiny(*overrides)


def test_refused_without_asserts() -> None:
    command = [sys.executable, "-O", str(ROOT / "train.py"), "model.dim=100", "model.n_heads=3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: model.dim=100: not divisible by model.n_heads=3")
