"""Small real models and training steps that the tests of the phantom share."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(
        self,
        vocab: int = 512,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, recompute: str = "") -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=recompute == "reentrant")
                if recompute
                else block(x)
            )
        return self.head(self.norm(x))


@dataclass
class Step:
    """One way to train; `run` makes `steps` steps of it on `device`."""

    dtype: torch.dtype | None = None
    recompute: str = ""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    accum: int = 1
    scaler: bool = False
    offload: Any = None
    batch: int = 4
    length: int = 64

    def run(self, model: nn.Module, device: torch.device, steps: int = 2, gpu: Any = None) -> None:
        optimizer = self.optimizer(model.parameters(), lr=1e-3, **self.options)
        scaler = torch.amp.GradScaler(device.type, enabled=self.scaler)
        for _ in range(steps):
            for _ in range(self.accum):
                self.backward(model, device, scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if gpu is not None:
                gpu.step_boundary()

    def backward(self, model: nn.Module, device: torch.device, scaler: Any) -> None:
        ids = torch.randint(0, 512, (self.batch, self.length), device=device)
        autocast = torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with self.offload() if self.offload else nullcontext(), autocast:
            logits = model(ids, self.recompute)  # (B, T, V)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        del logits
        scaler.scale(loss).backward()
