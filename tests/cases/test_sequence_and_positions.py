"""A sequence longer than the table of positions is refused, naming both, before any data is looked at."""

from collections.abc import Callable

import pytest

from memtrain.config import Config
from memtrain.errors import UserError


def test_longer_is_refused_and_equal_is_not(tiny: Callable[..., Config]) -> None:
    with pytest.raises(UserError, match=r"seq_len=32: longer than model.max_seq_len=16"):
        tiny("seq_len=32", "model.max_seq_len=16")
    assert tiny("seq_len=16", "model.max_seq_len=16").seq_len == 16
