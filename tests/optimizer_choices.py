"""Every optimizer that can be chosen, for tests that hold for all of them."""

from importlib.util import find_spec
from typing import get_args, get_type_hints

import pytest

from memtrain.config.tree import OptimizerConfig

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
NAMES: tuple[str, ...] = get_args(get_type_hints(OptimizerConfig)["name"])
OPTIMIZERS = [
    pytest.param(name, marks=[needs_bitsandbytes] if "8bit" in name else []) for name in NAMES
]
HOST_OPTIMIZERS = [name for name in NAMES if "8bit" not in name]
"""Those that offload=optimizer takes."""
