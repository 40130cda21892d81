"""A checkpoint's state is plain containers and tensors, which torch's safe loader takes."""

import torch
from command import Finished
from torch import Tensor

PLAIN = (dict, list, tuple, str, int, float, bool, type(None), Tensor)


def is_plain(value: object) -> bool:
    inside = list(value.values()) if isinstance(value, dict) else value
    deep = all(map(is_plain, inside)) if isinstance(inside, (list, tuple)) else True
    return type(value) in PLAIN and deep


def test_the_safe_loader_takes_it(straight: Finished) -> None:
    paths = sorted(straight.folder.glob("checkpoints/*/state.pt"))
    assert len(paths) == 2
    for path in paths:
        assert is_plain(torch.load(path, map_location="cpu", weights_only=True))
