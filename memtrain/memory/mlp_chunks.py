"""The second half of a block in pieces of the sequence, for long sequences (tiled MLP, Bekman et al. 2025)."""

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memtrain.model.layers import Block
from memtrain.model.transformer import Transformer


def chunk_mlps(model: Transformer, n_chunks: int, chosen: Collection[int]) -> None:
    """Norm and MLP of the `chosen` blocks hold the hidden states of one of `n_chunks` pieces at a time.

    Each piece is run again in backward: without that all of them would be kept after all.
    """
    for index, block in enumerate(model.blocks):
        if index in chosen:
            assert isinstance(block, Block)
            block.feed_forward = partial(_in_chunks, block.feed_forward, n_chunks)  # type: ignore[method-assign]


def _in_chunks(run: Callable[[Tensor], Tensor], n_chunks: int, x: Tensor) -> Tensor:
    pieces = torch.chunk(x, n_chunks, dim=1)  # (B, T / n, C) each
    return torch.cat([checkpoint(run, piece, use_reentrant=False) for piece in pieces], dim=1)
