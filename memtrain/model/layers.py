"""The parts of a Transformer block.

Shapes: B batch, T sequence, C model width, H query heads, K key/value heads, D head width, F hidden width of the MLP.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def make_norm(kind: str, dim: int, eps: float, bias: bool) -> nn.Module:
    """`layernorm` (Ba et al. 2016) or `rmsnorm` (Zhang and Sennrich 2019)."""
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, bias=bias)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than those of pretraining."""

    kind: str
    """`linear`; `llama3` (Dubey et al. 2024), slow ones only; `yarn` (Peng et al. 2023), slow ones and all scores."""
    factor: float
    original_max_seq_len: int = 0
    """The sequences of pretraining, which say what is slow."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """For `llama3`: turns in `original_max_seq_len` below which all, and above which none of `factor` applies."""
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    """The same for `yarn`."""
    attention_factor: float = 1.0
    """For `yarn`: cos and sin are multiplied by it."""


def rotary_table(
    seq_len: int,
    head_dim: int,
    theta: float,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """cos and sin of rotary positions (Su et al. 2021), fp32, (2, T, D)."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    if scaling is not None:
        inverse = scaled(inverse, theta, scaling)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)  # (T, D)
    table = torch.stack((angles.cos(), angles.sin()))
    return table if scaling is None else table * scaling.attention_factor


def scaled(inverse: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies (D / 2,) as `scaling` wants them."""
    slow = inverse / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        turns = inverse * scaling.original_max_seq_len / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        kept = 1 - yarn_ramp(inverse, theta, scaling)
    return slow * (1 - kept) + inverse * kept


def yarn_ramp(inverse: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """0 for frequencies that stay, 1 for those divided by the whole factor, a line between."""
    n_frequencies = len(inverse)

    def place(turns: float) -> float:
        """Of the frequency that makes so many turns in a sequence of pretraining."""
        length = scaling.original_max_seq_len / (2 * math.pi * turns)
        return n_frequencies * math.log(length) / math.log(theta)

    first = max(math.floor(place(scaling.beta_fast)), 0)
    last = min(math.ceil(place(scaling.beta_slow)), 2 * n_frequencies - 1)
    places = torch.arange(n_frequencies, device=inverse.device, dtype=torch.float32)
    return ((places - first) / (last - first or 0.001)).clamp(0, 1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary positions, (2, T, D) or one table per sequence, (2, B, 1, T, D), to (B, H, T, D).

    In the halves convention of the Llama checkpoints.
    """
    cos, sin = rotary.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that a token sees its own document up to itself: 0 or -inf, (B, 1, T, T).

    `starts` (B, T) says where the token's document, or its window, begins. In the type of the queries, and not as
    booleans: of those every block would make and keep a copy of its own.
    """
    place = torch.arange(starts.shape[1], device=starts.device)
    seen = (place <= place[:, None]) & (place >= starts[..., None])  # (B, T, T)
    nothing = torch.zeros((), dtype=dtype, device=starts.device)
    return torch.where(seen, nothing, -torch.inf).unsqueeze(1)


class Linear(nn.Linear):
    """nn.Linear that keeps no low-precision copy of its weight from forward to backward under autocast.

    Plain autocast lets autograd save the copy: 2 bytes per parameter over the whole model at the peak. Casting again in
    backward costs one pass over the weight and gives the same bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or self.weight.dtype != torch.float32:
            return super().forward(x)
        if torch.compiler.is_compiling():
            return self._traced(x)
        cast = x.detach().to(torch.get_autocast_dtype(kind))
        ticket = _LinearBackward.apply(x, cast, self.weight, self.bias)  # type: ignore[no-untyped-call]
        y: Tensor = _LinearForward.apply(ticket, cast, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y

    def _traced(self, x: Tensor) -> Tensor:
        """For torch.compile, whose partitioner would keep the copy, but obeys the marks that `checkpoint` sets."""
        dtype = torch.get_autocast_dtype(x.device.type)
        weight = checkpoint(self.weight.to, dtype, use_reentrant=False)
        return F.linear(x, weight, self.bias)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """What the gradient of a parameter is kept in."""
    dtype: torch.dtype | None = weight.grad_dtype
    return weight.dtype if dtype is None else dtype


class _LinearBackward(torch.autograd.Function):
    """The gradients of a linear layer; its forward only keeps what they need and returns a ticket without memory.

    What is kept is kept before the product is computed, so that recomputation, which stops once it has everything
    that was kept, need not compute the last product of a segment.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(cast if ctx.needs_input_grad[2] else None, weight)
        ctx.x_dtype = x.dtype
        return cast.new_empty(()).expand(*cast.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads  # (..., out)
        x_grad = weight_grad = bias_grad = None
        with torch.autocast(grad.device.type, enabled=False):
            rows = grad.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                x_grad = (grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
            if ctx.needs_input_grad[2]:
                weight_grad = (rows.t() @ x.flatten(0, -2)).to(gradient_dtype(weight))
            if ctx.needs_input_grad[3]:
                bias_grad = rows.sum(0).to(gradient_dtype(weight))
        return x_grad, None, weight_grad, bias_grad


class _LinearForward(torch.autograd.Function):
    """The product; its gradient goes to the ticket."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


@dataclass(frozen=True)
class Heads:
    """Fewer key/value heads than heads is grouped-query (Ainslie et al. 2023)."""

    n_query: int
    n_kv: int
    width: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of the queries, keys and values in the matrix that makes all three."""
        return self.n_query * self.width, self.n_kv * self.width, self.n_kv * self.width


class Attention(nn.Module):
    """Causal self-attention; `qk_norm_eps` normalises each query and key over its head."""

    def __init__(
        self,
        dim: int,
        heads: Heads,
        qkv_bias: bool,
        out_bias: bool,
        dropout: float,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads.n_query, heads.n_kv, heads.width
        self.dropout = dropout
        self.qkv = Linear(dim, sum(heads.rows), bias=qkv_bias)
        self.out = Linear(heads.rows[0], dim, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(heads.width, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(heads.width, eps=qk_norm_eps)

    def forward(
        self, x: Tensor, rotary: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:  # (B, T, C) -> (B, T, C)
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, self.n_heads + 2 * self.n_kv_heads, self.head_dim)
        q, k, v = heads.transpose(1, 2).split(
            (self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        grouped = self.n_kv_heads != self.n_heads
        if grouped and mask is not None:  # no fused CUDA kernel takes both
            repeats = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=grouped and mask is None,
        )
        return self.out(y.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class GeluMLP(nn.Module):
    """Two matrices with GELU between them, as in GPT-2: its tanh approximation, or the exact one."""

    def __init__(self, dim: int, hidden: int, bias: bool, exact: bool = False) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, hidden, bias=bias), Linear(hidden, dim, bias=bias)
        self.approximate = "none" if exact else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))  # type: ignore[no-any-return]


class SwigluMLP(nn.Module):
    """Gated MLP (Shazeer 2020), as in Llama."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = Linear(dim, hidden, bias=bias), Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); of what all blocks share it takes what it uses."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: float,
        rotates: bool = True,
        windowed: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.rotates, self.windowed = rotates, windowed

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Tensor | None = None,
        window_mask: Tensor | None = None,
    ) -> Tensor:
        """`window_mask`: None where no window is shorter than the sequence."""
        if self.windowed and window_mask is not None:
            mask = window_mask
        if not self.rotates:
            rotary = None
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, mask))
        return self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]
