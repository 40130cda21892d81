"""Recomputation (activation checkpointing, Chen et al. 2016): keep the input of a segment, run it again in backward."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtrain.model.transformer import Segment, Transformer


def _run(blocks: Sequence[nn.Module], x: Tensor, rotary: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, rotary)
    return x


def recomputed(blocks: Sequence[nn.Module]) -> Segment:
    """A segment of which only the input is kept. Non-reentrant, random state preserved: gradients are bit-equal."""
    return partial(checkpoint, partial(_run, blocks), use_reentrant=False)


def recompute_segments(model: Transformer, every: int) -> None:
    """N consecutive blocks form a segment; the last one may be shorter."""
    blocks = list(model.blocks)
    model.segments = [
        recomputed(blocks[start : start + every]) for start in range(0, len(blocks), every)
    ]


def recompute_alternate(model: Transformer, every: int) -> None:
    """Block i is recomputed unless i is a multiple of `every`."""
    model.segments = [
        recomputed([block]) if index % every else block for index, block in enumerate(model.blocks)
    ]
