"""x W^T + bias with a frozen W, and pairs of low rank on ranges of its rows, as one autograd function.

Shapes: N tokens, I inputs, O outputs; of pair k: R rank, rows start to end of W.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memtrain.model.layers import gradient_dtype


@dataclass(frozen=True)
class Pair:
    """Adds scale x B A to rows `start` to `end` of the frozen matrix."""

    start: int
    end: int
    a: nn.Parameter  # (R, I)
    b: nn.Parameter  # (end - start, R)
    scale: float


@dataclass(frozen=True)
class Frozen:
    """`weight` makes the matrix (O, I) in the given type; it is called in forward and again in backward."""

    out_features: int
    weight: Callable[[torch.dtype], Tensor]
    bias: Tensor | None = None


def frozen_product(
    x: Tensor, frozen: Frozen, pairs: Sequence[Pair] = (), dropout: float = 0.0
) -> Tensor:
    """Keeps x in the type it is multiplied in, the mask of its dropout as booleans, and no matrix."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        if torch.compiler.is_compiling():
            return _traced(x.to(dtype), frozen, pairs, dropout)
        cast = x.detach().to(dtype)
        mask = torch.empty_like(cast, dtype=torch.bool).bernoulli_(1 - dropout) if dropout else None
        call = _Call(frozen, pairs, [pair.scale / (1 - dropout) for pair in pairs])
        ab = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        ticket = _Backward.apply(call, x, cast, mask, *ab)  # type: ignore[no-untyped-call]
        y: Tensor = _Forward.apply(ticket, call, cast, mask)  # type: ignore[no-untyped-call]
        return y


def _traced(x: Tensor, frozen: Frozen, pairs: Sequence[Pair], dropout: float) -> Tensor:
    """For torch.compile, which finds by itself what to keep."""
    y = F.linear(x, frozen.weight(x.dtype), _to(frozen.bias, x.dtype))
    dropped = F.dropout(x, dropout)
    for pair in pairs:
        delta = F.linear(F.linear(dropped, pair.a.to(x.dtype)), pair.b.to(x.dtype)) * pair.scale
        y = y + F.pad(delta, (pair.start, frozen.out_features - pair.end))
    return y


@dataclass(frozen=True)
class _Call:
    frozen: Frozen
    pairs: Sequence[Pair]
    scales: list[float]
    """With dropout's: what is masked is not scaled."""

    def all_a(self, dtype: torch.dtype) -> Tensor:
        """(sum of R, I): the pairs read the same x."""
        return torch.cat([pair.a for pair in self.pairs]).to(dtype)

    def all_b(self, dtype: torch.dtype) -> list[Tensor]:
        """(end - start, R) each, scaled."""
        both = zip(self.pairs, self.scales, strict=True)
        return [(pair.b * scale).to(dtype) for pair, scale in both]

    def ranks(self) -> list[int]:
        return [len(pair.a) for pair in self.pairs]


class _Backward(torch.autograd.Function):
    """The gradients; its forward only keeps what they need and returns a ticket without memory.

    What is kept is kept before the product is computed, so that recomputation, which stops once it has everything
    that was kept, need not compute the last product of a segment.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, cast: Tensor, mask: Tensor | None, *ab: Tensor
    ) -> Tensor:
        ctx.call, ctx.x_dtype, ctx.dtype = call, x.dtype, cast.dtype
        ctx.save_for_backward(cast if ab else None, mask, *ab)
        return cast.new_empty(()).expand(*cast.shape[:-1], call.frozen.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, mask, *ab) = ctx.call, ctx.saved_tensors
        (grad,) = grads  # (..., O)
        with torch.autocast(grad.device.type, enabled=False):
            rows = grad.flatten(0, -2)  # (N, O)
            x_grad = rows @ call.frozen.weight(ctx.dtype) if ctx.needs_input_grad[1] else None
            ab_grads: list[Tensor] = []
            if ab:
                parts = _pull(call, rows)  # (N, sum of R)
                if x_grad is not None:
                    _add_pulled(x_grad, parts, call, mask)
                ab_grads = _pair_gradients(call, rows, parts, _masked(x, mask).flatten(0, -2))
            if x_grad is not None:
                x_grad = x_grad.view(*grad.shape[:-1], -1).to(ctx.x_dtype)
        return None, x_grad, None, None, *ab_grads


class _Forward(torch.autograd.Function):
    """The product; its gradient goes to the ticket."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, call: _Call, x: Tensor, mask: Tensor | None) -> Tensor:
        dtype = x.dtype
        y = F.linear(x, call.frozen.weight(dtype), _to(call.frozen.bias, dtype))
        if not call.pairs:
            return y.detach()
        if _products_are_kept():
            y = y.clone()
        low = _masked(x, mask).flatten(0, -2) @ call.all_a(dtype).t()  # (N, sum of R)
        low_parts = torch.split(low, call.ranks(), dim=1)
        rows = y.view(-1, y.shape[-1])  # (N, O)
        for pair, part, b in zip(call.pairs, low_parts, call.all_b(dtype), strict=True):
            rows[:, pair.start : pair.end].addmm_(part, b.t())
        return y.detach()  # not as a view: what is one cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


def _products_are_kept() -> bool:
    """Selective recomputation keeps the products of a segment, or hands out those it has kept: not to be changed."""
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def _to(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _pull(call: _Call, rows: Tensor) -> Tensor:
    """(N, sum of R): the gradients of A x."""
    slices = [rows[:, pair.start : pair.end] for pair in call.pairs]
    pulled = [part @ b for part, b in zip(slices, call.all_b(rows.dtype), strict=True)]
    return pulled[0] if len(pulled) == 1 else torch.cat(pulled, dim=1)


def _add_pulled(x_grad: Tensor, pulled: Tensor, call: _Call, mask: Tensor | None) -> None:
    a = call.all_a(pulled.dtype)
    if mask is None:
        x_grad.addmm_(pulled, a)
    else:
        x_grad.add_((pulled @ a).mul_(mask.flatten(0, -2)))


def _pair_gradients(call: _Call, rows: Tensor, pulled: Tensor, x: Tensor) -> list[Tensor]:
    """Of a and b of every pair, in the type in which each keeps its gradient. A x is computed again."""
    low = torch.split(x @ call.all_a(x.dtype).t(), call.ranks(), dim=1)  # (N, R) each
    a_grads = torch.split(pulled.t() @ x, call.ranks())  # (R, I) each
    grads = []
    for pair, scale, a_grad, part in zip(call.pairs, call.scales, a_grads, low, strict=True):
        b_grad = rows[:, pair.start : pair.end].t() @ part
        # A copy, so that no gradient holds the memory of another.
        grads.append(a_grad.to(gradient_dtype(pair.a), copy=True))
        grads.append(b_grad.to(gradient_dtype(pair.b)).mul_(scale))
    return grads
