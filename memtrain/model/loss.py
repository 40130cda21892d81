"""Head and cross-entropy in one: hidden states in, the loss summed over all target tokens out, always in fp32.

Shapes: B batch, T sequence, N = B x T tokens, C model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.data.loader import IGNORE_INDEX
from memtrain.model.layers import gradient_dtype
from memtrain.units import MIB

MIN_ROWS = 256
"""Tokens per chunk, at least: fewer would leave the matrix products waiting for the head's weight."""

SUM_BYTES = 512 * MIB
"""A 16-bit head's gradient is summed in fp32 over chunks up to this; a larger one is formed by blocks of vocabulary."""

VOCAB_BLOCK = 8192
"""Vocabulary entries whose head gradient is added at a time, where it has another type than the product."""

ALIGNED = 64
"""A block of vocabulary is a multiple of this: matrix products are slow on rows that are not aligned."""

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Hidden states (B, T, C), head weight (V, C), targets (B, T), factor () -> factor x summed loss, a scalar in fp32."""


@dataclass(frozen=True)
class Terms:
    """What is added to plain cross-entropy."""

    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the vocabulary (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator (Chowdhery et al. 2022, section 5)."""


def full_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, terms: Terms = Terms()
) -> Tensor:
    """All logits at once: 4 bytes per token and vocabulary entry, several times over at the peak."""
    logits = F.linear(hidden, head).flatten(0, 1).float()  # (N, V)
    targets = targets.flatten()
    loss = F.cross_entropy(
        logits,
        targets,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=terms.label_smoothing,
    )
    if terms.z_loss:
        log_z = torch.logsumexp(logits, dim=-1)
        loss = loss + terms.z_loss * (log_z.square() * (targets != IGNORE_INDEX)).sum()
    return loss * factor


def chunked_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    factor: Tensor,
    terms: Terms = Terms(),
    chunk_bytes: int = 64 * MIB,
) -> Tensor:
    """Logits exist for as many tokens at a time as `chunk_bytes` hold; gradients are formed with them, in forward.

    Multiplies in the type that autocast (or `hidden`) has, all else in fp32. Backward only hands the gradients out.

    A 16-bit head above SUM_BYTES needs its logits a second time. A sum in bf16 would save that, but rounds once per
    chunk: at 128 chunks its relative error was 0.012, against 0.0022 here and in `full_loss`.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.flatten(0, 1)  # (N, C)
        loss: Tensor = _ChunkedCrossEntropy.apply(
            rows, head, targets.flatten(), factor, terms, _Chunks(chunk_bytes, dtype)
        )  # type: ignore[no-untyped-call]
    return loss


def chunk_rows(n_rows: int, vocab_size: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """Tokens per chunk: logits exist in fp32 and, if it is another, in the type they were multiplied in."""
    entry_bytes = 4 if dtype == torch.float32 else 4 + dtype.itemsize
    wanted = max(MIN_ROWS, chunk_bytes // (vocab_size * entry_bytes))
    n_chunks = -(-n_rows // wanted)
    return -(-n_rows // n_chunks)  # chunks of equal size


@dataclass(frozen=True)
class _Chunks:
    most_bytes: int
    dtype: torch.dtype
    """What rows and weight are multiplied in."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        factor: Tensor,
        terms: Terms,
        chunks: _Chunks,
    ) -> Tensor:
        dtype = chunks.dtype
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        weight = head.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.hidden_grad = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
        by_vocabulary = wants_head and head.dtype != torch.float32 and 4 * head.numel() > SUM_BYTES
        head_grad = None
        if wants_head and not by_vocabulary:
            head_grad = torch.zeros_like(head, dtype=torch.float32)
        log_z = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        step = chunk_rows(len(hidden), len(head), dtype, chunks.most_bytes)
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            rows = hidden[part].to(dtype)
            logits = (rows @ weight.t()).float()  # (n, V)
            chunk_loss, log_z[part], gradient = _cross_entropy(
                logits, targets[part], factor, terms, wants_hidden or head_grad is not None
            )
            del logits
            loss += chunk_loss
            if gradient is None:
                continue
            gradient = gradient.to(dtype)
            if wants_hidden:
                torch.mm(gradient, weight, out=ctx.hidden_grad[part])
            if head_grad is not None:
                _add_product(head_grad, gradient, rows)
            del gradient
        if by_vocabulary:
            n_entries = step * len(head) // len(hidden)  # as many logits as a chunk has
            size = max(ALIGNED, n_entries // ALIGNED * ALIGNED)
            rows = hidden.to(dtype)
            head_grad = _head_gradient(rows, weight, targets, log_z, factor, terms, size)
        ctx.head_grad = None if head_grad is None else head_grad.to(gradient_dtype(head))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: they would count as constants
            raise RuntimeError("chunked loss: its gradients have none of their own; use loss=full")
        if ctx.hidden_grad is None and ctx.head_grad is None:
            raise RuntimeError("chunked loss: the first backward took its gradients; use loss=full")
        (grad,) = grads
        hidden_grad, ctx.hidden_grad = ctx.hidden_grad, None
        head_grad, ctx.head_grad = ctx.head_grad, None
        for gradient in (hidden_grad, head_grad):
            if gradient is not None:
                gradient.mul_(grad)
        return hidden_grad, head_grad, None, None, None, None


def _head_gradient(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    log_z: Tensor,
    factor: Tensor,
    terms: Terms,
    size: int,
) -> Tensor:
    """(V, C), `size` vocabulary entries at a time: each is one product over all N tokens, which adds in fp32."""
    found = torch.empty_like(weight)
    learned = (targets != IGNORE_INDEX) * factor  # (N,)
    for start in range(0, len(weight), size):
        block = weight[start : start + size]
        logits = (rows @ block.t()).float()  # (N, size)
        place = targets - start
        inside = (place >= 0) & (place < len(block))
        gradient = _gradient(
            logits.sub_(log_z.unsqueeze(1)).exp_(),
            learned * (1 + 2 * terms.z_loss * log_z),
            torch.where(inside, place, 0).unsqueeze(1),
            learned * inside,
            learned / len(weight),
            terms,
        ).to(rows.dtype)
        del logits
        torch.mm(gradient.t(), rows, out=found[start : start + size])
        del gradient
    return found


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """`total` (V, C) += `gradient` (n, V) transposed times `rows` (n, C), without a second (V, C)."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), rows)
        return
    for start in range(0, len(total), VOCAB_BLOCK):
        block = slice(start, start + VOCAB_BLOCK)
        total[block] += gradient[:, block].t() @ rows


def _cross_entropy(
    logits: Tensor, targets: Tensor, factor: Tensor, terms: Terms, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summed loss, log-denominators (n,) and gradient of fp32 logits (n, V), the first and the last times `factor`.

    The gradient takes the logits' memory.
    """
    counted = targets != IGNORE_INDEX  # (n,)
    index = torch.where(counted, targets, 0).unsqueeze(1)  # (n, 1); no class: gather fails
    smoothing, n_classes = terms.label_smoothing, logits.shape[1]
    picked = logits.gather(1, index).squeeze(1)
    mean = logits.mean(dim=1) if smoothing else picked
    largest = logits.amax(dim=1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(dim=1)
    log_z = total.log() + largest.squeeze(1)
    losses = log_z - (1 - smoothing) * picked - smoothing * mean + terms.z_loss * log_z.square()
    weight = counted * factor  # (n,)
    loss = torch.where(counted, losses, 0.0).sum() * factor
    if not wants_gradient:
        return loss, log_z, None
    scale = weight * (1 + 2 * terms.z_loss * log_z) / total
    gradient = _gradient(exponentials, scale, index, weight, weight / n_classes, terms)
    return loss, log_z, gradient


def _gradient(
    exponentials: Tensor, scale: Tensor, index: Tensor, own: Tensor, share: Tensor, terms: Terms
) -> Tensor:
    """Of logits (n, V), in the memory of their `exponentials`; `own` is taken off at `index`, `share` everywhere."""
    gradient = exponentials.mul_(scale.unsqueeze(1))
    gradient.scatter_add_(1, index, (-(1 - terms.label_smoothing) * own).unsqueeze(1))
    if terms.label_smoothing:
        gradient.sub_((terms.label_smoothing * share).unsqueeze(1))
    return gradient
