"""fp8 is not there yet, and says so before anything starts."""

from collections.abc import Callable

import pytest

from memtrain.config import Config
from memtrain.errors import UserError


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_fp8_is_refused(config: Callable[..., Config], device: str) -> None:
    with pytest.raises(UserError, match="precision=fp8: not available in this version"):
        config("debug=tiny", "precision=fp8", f"device={device}")
