"""AdamW with moments in 8 bits and an fp32 scale per 256 elements (Dettmers et al. 2022, arXiv:2110.02861).

bitsandbytes' own, made to be planned and made one per parameter, too. Imported where it is wanted, for bitsandbytes is
an extra. Parameters below 4,096 elements keep 32 bits. The step on the CPU is ours: bitsandbytes' rounds there by a
coarse table which has no number below 1.5e-5 of a block's largest and no zero, so that weights without a gradient move.
"""

import math
from functools import cache
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

BLOCK = 256
"""Elements that share a scale."""
PIECE = 4096 * BLOCK
"""Elements that are in fp32 at a time."""
PAGED_FROM = 10**5
"""Elements from which bitsandbytes pages a state."""


@cache
def table(*, signed: bool) -> list[float]:
    """The 256 numbers that 8 bits stand for: real ones even where a mode makes tensors without data."""
    with _disable_current_modes():
        values: list[float] = create_dynamic_map(signed).tolist()
    return values


@cache
def codes(*, signed: bool) -> Tensor:
    """uint8 (65536,): for the bits of each bf16 number the index of the nearest in `table`.

    A second moment (unsigned) that is not zero does not become it: what is left of the first would be divided by eps.
    """
    with _disable_current_modes():
        numbers = torch.tensor(table(signed=signed))
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        values = bits.view(torch.bfloat16).float()
        nearest = torch.bucketize(values, (numbers[1:] + numbers[:-1]) / 2)
        if not signed:
            nearest += (nearest == 0) & (values > 0)
        return nearest.to(torch.uint8)


def quantized(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """uint8 (n,) and the scales (blocks,) of fp32 (n,). What rounds to zero is zero, and nothing changes its sign."""
    blocks = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    bits = scaled.bfloat16().view(torch.int16).int() & 0xFFFF
    return codes(signed=signed)[bits].view(-1)[: len(values)], scales


def dequantized(indices: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    """fp32 (n,) of uint8 (n,)."""
    values = numbers[pad(indices, (0, -len(indices) % BLOCK)).int()].view(-1, BLOCK)
    return (values * scales.unsqueeze(1)).view(-1)[: len(indices)]


def step_on_cpu(weight: Tensor, state: dict[str, Any], config: dict[str, Any]) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with moments as above, piece by piece."""
    (beta1, beta2, *_), lr = config["betas"], config["lr"]
    step_size = lr / (1 - beta1 ** state["step"])
    correction = math.sqrt(1 - beta2 ** state["step"])
    flat, gradient = weight.data.view(-1), weight.grad.view(-1)  # type: ignore[union-attr]
    moments = [state["state1"].view(-1), state["state2"].view(-1)]
    for start in range(0, len(flat), PIECE):
        piece = slice(start, start + PIECE)
        blocks = slice(start // BLOCK, (start + PIECE) // BLOCK)
        g, w = gradient[piece].float(), flat[piece].float()
        m = dequantized(moments[0][piece], state["absmax1"][blocks], state["qmap1"])
        v = dequantized(moments[1][piece], state["absmax2"][blocks], state["qmap2"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        w.mul_(1 - lr * config["weight_decay"])
        flat[piece] = w.addcdiv_(m, (v.sqrt() / correction).add_(config["eps"]), value=-step_size)
        moments[0][piece], state["absmax1"][blocks] = quantized(m, signed=True)
        moments[1][piece], state["absmax2"][blocks] = quantized(v, signed=False)


class _Ours:
    """What differs from bitsandbytes, which computes the tables for every optimizer anew."""

    name2qmap: dict[str, Tensor]

    def fill_qmap(self) -> None:
        self.name2qmap["dynamic"] = torch.tensor(table(signed=True))
        self.name2qmap["udynamic"] = torch.tensor(table(signed=False))

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]  # type: ignore[attr-defined]
        if p.device.type != "cpu" or state["state1"].dtype != torch.uint8:
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
            return
        p.data, p.grad = p.data.contiguous(), p.grad.contiguous()  # type: ignore[union-attr]
        state["step"] += 1
        step_on_cpu(p, state, self.get_config(gindex, pindex, group))  # type: ignore[attr-defined]


class AdamW8bit(_Ours, bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]
    """State on the parameter's device."""


class PagedAdamW8bit(_Ours, bitsandbytes.optim.PagedAdamW8bit):  # type: ignore[misc]
    """State in CUDA's managed memory, which torch takes for the host's; elsewhere than on CUDA the host's it is."""

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if p.device.type == "cuda":
            return super().get_state_buffer(p, dtype)  # type: ignore[no-any-return]
        if p.numel() < PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        buffer = torch.zeros(p.shape, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]  # may be on another device than the weight
        return buffer

    def prefetch_state(self, p: Tensor) -> None:
        if p.device.type == "cuda":
            super().prefetch_state(p)
