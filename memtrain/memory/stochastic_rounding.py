"""Rounding that keeps small updates of bf16 weights in the mean, where rounding to nearest would drop them all."""

import torch
from torch import Tensor

PIECE = 2**22
"""Elements rounded at a time: bounds what exists beside the two tensors."""


@torch.no_grad()
def round_stochastically(target: Tensor, source: Tensor) -> None:
    """Write fp32 `source` into bf16 `target`, both contiguous: up or down, so that the mean is `source`.

    What bf16 holds stays as it is, and so do infinities and NaN. Draws from the default generator of the device.
    """
    assert (target.dtype, source.dtype) == (torch.bfloat16, torch.float32)
    targets, sources = (torch.split(tensor.view(-1), PIECE) for tensor in (target, source))
    for target_piece, source_piece in zip(targets, sources, strict=True):
        target_piece.copy_(_rounded(source_piece))


def _rounded(source: Tensor) -> Tensor:
    """fp32 values that bf16, the upper half of an fp32, holds.

    Random bits added below the upper half carry into it with the probability that the lower half is of its range.
    """
    bits = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device)
    bits.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    # A NaN may have its only bits in the lower half, or carry into the sign.
    return torch.where(source.isfinite(), bits.view(torch.float32), source)
