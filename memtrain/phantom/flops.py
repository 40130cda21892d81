"""How many floating-point operations one call of an operator takes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

aten = torch.ops.aten


def matmul_flops(args: Any, out: Any) -> int:
    """2 * rows * inner * columns of mm, bmm and their relatives (mat1 and mat2 are the last two)."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    out_numel: int = out.numel()
    return 2 * out_numel * int(tensors[-2].shape[-1])


def scaled_mm_flops(args: Any, out: Any) -> int:
    return 2 * int(out.numel()) * int(args[0].shape[-1])


def grouped_mm_flops(args: Any, out: Any) -> int:
    """As one product: each row, each column or each inner index belongs to one group."""
    a, b = args[:2]
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    flops: int = 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]
    return flops


def _convolution_flops(x: Any, weight: Any, out: Any, transposed: bool) -> int:
    """Every weight meets every place of the output, or of the input if that is the smaller."""
    places = (x if transposed else out).shape[2:]
    flops: int = 2 * x.shape[0] * prod(places) * weight.numel()
    return flops


def convolution_flops(args: Any, out: Any) -> int:
    return _convolution_flops(args[0], args[1], out, transposed=args[6])


def convolution_backward_flops(args: Any, out: Any) -> int:
    """As much as forward for each of the gradients of input and weight that is wanted."""
    grad, x, weight = args[:3]
    wanted = int(args[10][0]) + int(args[10][1])
    return wanted * _convolution_flops(x, weight, grad, transposed=args[7])


def attention_flops(args: Any, out: Any) -> int:
    """Two products of (T, D) x (S, D) per head; a causal mask is not subtracted."""
    q, k, v = args[:3]
    flops: int = 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return flops


def attention_backward_flops(args: Any, out: Any) -> int:
    """The scores once more, then four products: five in all."""
    q, k, v = args[1:4]
    flops: int = 2 * prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])
    return flops


def _flops() -> dict[Any, tuple[str, Callable[[Any, Any], int]]]:
    table: dict[Any, tuple[str, Callable[[Any, Any], int]]] = {}
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"):
        table[getattr(aten, name).default] = ("matmul", matmul_flops)
    if hasattr(aten, "_scaled_mm"):
        table[aten._scaled_mm.default] = ("matmul", scaled_mm_flops)
    if hasattr(aten, "_grouped_mm"):
        table[aten._grouped_mm.default] = ("matmul", grouped_mm_flops)
    table[aten.convolution.default] = ("convolution", convolution_flops)
    table[aten.convolution_backward.default] = ("convolution", convolution_backward_flops)
    for kernel in ("flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        for suffix, count in (("", attention_flops), ("_backward", attention_backward_flops)):
            packet = getattr(aten, f"_scaled_dot_product_{kernel}{suffix}", None)
            if packet is not None:
                table[packet.default] = ("attention", count)
    return table


FLOPS = _flops()
"""Operator -> kind, and floating-point operations of one call (a multiply-add is two)."""
