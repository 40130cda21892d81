"""What a person may choose: `parse` makes a `Config` of a plain dict. Nothing else here is needed to read one."""

from memtrain.config.read import parse
from memtrain.config.tree import Config

__all__ = ["Config", "parse"]
