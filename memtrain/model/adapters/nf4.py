"""Frozen matrices of four bits a value: NF4 (Dettmers et al. 2023), by bitsandbytes' operators.

Blocks of 64 values share a scale. With double quantization the scales take 8 bits each, in blocks of 256.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memtrain.errors import UserError
from memtrain.model.adapters.product import Frozen, frozen_product

BLOCK = 64
SCALES_BLOCK = 256


class NF4Linear(nn.Module):
    """A linear layer whose weight (O, I) is packed; dequantized where it is used, and again in backward.

    `rows` are the heights of the matrices that it joins: each is quantized by itself, as if it were alone.
    Its parameters are on meta until someone gives them storage; then `quantize` fills them matrix by matrix.
    """

    def __init__(
        self, rows: Sequence[int], in_features: int, bias: nn.Parameter | None, double: bool
    ) -> None:
        super().__init__()
        import_bitsandbytes()
        self.rows, self.in_features, self.out_features = tuple(rows), in_features, sum(rows)
        self.double_quantized = double
        n_blocks = sum(self._blocks())
        scale_type = torch.uint8 if double else torch.float32
        self.packed = _frozen(sum(self._bytes()), torch.uint8)
        self.absmax = _frozen(n_blocks, scale_type)
        self.scales = _frozen(sum(self._scales()), torch.float32) if double else None
        """Of the scales, matrix by matrix: one a block of them, then their mean."""
        self.bias = bias

    @property
    def n_values(self) -> int:
        """What the packed bytes stand for."""
        return self.out_features * self.in_features

    def _bytes(self) -> list[int]:
        return [-(-rows * self.in_features // 2) for rows in self.rows]

    def _blocks(self) -> list[int]:
        return [-(-rows * self.in_features // BLOCK) for rows in self.rows]

    def _scales(self) -> list[int]:
        return [-(-blocks // SCALES_BLOCK) + 1 for blocks in self._blocks()]

    def _part(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Packed values, scales and the scales' scales of one matrix: views."""
        scales = None if self.scales is None else _piece(self.scales, self._scales(), index)
        packed = _piece(self.packed, self._bytes(), index)
        return packed, _piece(self.absmax, self._blocks(), index), scales

    @torch.no_grad()
    def quantize(self, index: int, weight: Tensor) -> None:
        """Fill the matrix `index` from its dense values, in whatever type and place they are."""
        packed, absmax, scales = self._part(index)
        values, found = torch.ops.memtrain.nf4_pack(weight.to(packed.device))
        packed.copy_(values)
        if scales is None:
            absmax.copy_(found)
        else:
            for place, part in zip(
                (absmax, scales), torch.ops.memtrain.nf4_pack_scales(found), strict=True
            ):
                place.copy_(part)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """(O, I)."""
        device = self.packed.device
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        for index, rows in enumerate(torch.split(weight, list(self.rows))):
            packed, absmax, scales = self._part(index)
            if scales is not None:
                absmax = torch.ops.memtrain.nf4_scales(absmax, scales)
            torch.ops.memtrain.nf4_unpack(rows, packed, absmax)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return frozen_product(x, Frozen(self.out_features, self.dequantized, self.bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, double={self.double_quantized}"


def _frozen(n: int, dtype: torch.dtype) -> nn.Parameter:
    """A column: matrices are what parameter offload streams."""
    return nn.Parameter(torch.empty(n, 1, dtype=dtype, device="meta"), requires_grad=False)


def _piece(column: Tensor, sizes: list[int], index: int) -> Tensor:
    end = list(accumulate(sizes))[index]
    return column.detach()[end - sizes[index] : end].view(-1)


def import_bitsandbytes() -> Any:
    """Raises UserError without it. Its tables are made on import: real ones, whatever mode is on."""
    try:
        with _disable_current_modes(), torch.device("cpu"):
            import bitsandbytes
    except ImportError as error:
        raise UserError(
            "NF4 weights: need bitsandbytes; pip install 'memtrain[quantized]'"
        ) from error
    return bitsandbytes


@cache
def _scale_code(device: torch.device) -> Tensor:
    """The 256 values of an 8-bit scale."""
    code: Tensor = import_bitsandbytes().functional.create_dynamic_map()
    return code.to(device)


# bitsandbytes' operators take what selective recomputation cannot hand through; these do not.


@torch.library.custom_op("memtrain::nf4_pack", mutates_args=())
def _nf4_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two values a byte, and one scale a block."""
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(
        weight.contiguous(), BLOCK, "nf4", torch.uint8
    )
    return packed.view(-1), absmax


@_nf4_pack.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    n = weight.numel()
    packed = weight.new_empty(-(-n // 2), dtype=torch.uint8)
    return packed, weight.new_empty(-(-n // BLOCK), dtype=torch.float32)


@torch.library.custom_op("memtrain::nf4_pack_scales", mutates_args=())
def _nf4_pack_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits a scale, and the scales of those with their mean at the end."""
    mean = absmax.mean()
    packed, scales = torch.ops.bitsandbytes.quantize_blockwise(
        absmax - mean, _scale_code(absmax.device), SCALES_BLOCK
    )
    return packed, torch.cat((scales, mean.view(1)))


@_nf4_pack_scales.register_fake
def _(absmax: Tensor) -> tuple[Tensor, Tensor]:
    n = absmax.numel()
    scales = absmax.new_empty(-(-n // SCALES_BLOCK) + 1, dtype=torch.float32)
    return absmax.new_empty(n, dtype=torch.uint8), scales


@torch.library.custom_op("memtrain::nf4_scales", mutates_args=())
def _nf4_scales(absmax: Tensor, scales: Tensor) -> Tensor:
    """What `nf4_pack_scales` has packed."""
    found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax, scales[:-1], _scale_code(absmax.device), SCALES_BLOCK, torch.float32
    )
    return found.add_(scales[-1])


@_nf4_scales.register_fake
def _(absmax: Tensor, scales: Tensor) -> Tensor:
    return absmax.new_empty(absmax.shape, dtype=torch.float32)


@torch.library.custom_op("memtrain::nf4_unpack", mutates_args=("out",))
def _nf4_unpack(out: Tensor, packed: Tensor, absmax: Tensor) -> None:
    """Into `out` (O, I)."""
    arguments = packed.view(-1, 1), absmax, BLOCK, "nf4", out.shape, out.dtype
    if out.device.type == "cuda":
        torch.ops.bitsandbytes.dequantize_4bit.out(*arguments, out=out)
    else:
        out.copy_(torch.ops.bitsandbytes.dequantize_4bit(*arguments))


@_nf4_unpack.register_fake
def _(out: Tensor, packed: Tensor, absmax: Tensor) -> None:
    return None
