"""Recomputing in backward, outside of autocast, happens under the autocast of forward."""

from collections.abc import Callable

import torch
from workbench import Workbench

from memtrain.config import Config


def test_the_same_types_and_bits(tiny: Callable[..., Config], bench: Workbench) -> None:
    window = bench.window(bench.samples(), 8)
    kept = bench.gradients(bench.step(tiny("precision=bf16")), window)
    step = bench.step(tiny("precision=bf16", "checkpoint_every=1"))
    seen: list[torch.dtype] = []
    up = step.model.blocks[0].mlp.up
    up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    again = bench.gradients(step, window)
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert all(kept[name].equal(again[name]) for name in kept)
