"""bitsandbytes' 4-bit linear layer over plain packed bytes, so that it runs without data.

`Params4bit` cannot hold a tensor without data. Here the packed bytes are a frozen parameter, made on the device; the
product is that of bitsandbytes 0.43 (autograd/_functions.py, MatMul4Bit), which is what the published rows ran: the
weight is made dense in forward and again in backward.
"""

from typing import Any

import bitsandbytes as bnb
import bitsandbytes.functional as functional
import torch
from torch import Tensor, nn


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.state, ctx.packed = state, packed
        return nn.functional.linear(x, functional.dequantize_4bit(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight = functional.dequantize_4bit(ctx.packed, ctx.state).to(grad.dtype)
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


class Packed(bnb.nn.Linear4bit):  # peft puts its 4-bit LoRA layer on this class
    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.empty(linear.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = False, "nf4"
        self.bias = linear.bias
        self.compute_dtype, self.compute_type_is_set = torch.bfloat16, True
        self.quant_state = None

    def quantize(self, device: torch.device, double: bool) -> None:
        dense = torch.empty(
            self.out_features, self.in_features, dtype=torch.bfloat16, device=device
        )
        packed, self.quant_state = functional.quantize_4bit(
            dense, blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out = MatMul4Bit.apply(x.to(self.compute_dtype), self.weight, bias, self.quant_state)
        return out.to(x.dtype)  # type: ignore[no-any-return]


def pack_linears(module: nn.Module) -> None:
    """All but the head, as transformers does it."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and name != "lm_head":
            setattr(module, name, Packed(child))
        else:
            pack_linears(child)


def quantize_all(module: nn.Module, device: torch.device, double: bool) -> None:
    for child in module.modules():
        if isinstance(child, Packed):
            child.quantize(device, double)
