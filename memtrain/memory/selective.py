"""Selective recomputation (Korthikanti et al. 2022): keep what is expensive to compute, compute the rest again."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

OPERATORS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}
"""What a name in `checkpointing.keep` stands for, as operators of torch.ops.aten."""


def selective_contexts(
    keep: Sequence[str], matmul_fraction: float
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for one segment: outputs of the operators in `keep` stay, of matrix products this share of them."""
    choose = partial(
        _choose, _overloads(keep), _overloads(["matmul"]), matmul_fraction, {True: 0, False: 0}
    )
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]
    )
    return contexts


def _overloads(names: Sequence[str]) -> set[Any]:
    operators = (name for kind in names for name in OPERATORS[kind])
    return {
        getattr(torch.ops.aten, name).default for name in operators if hasattr(torch.ops.aten, name)
    }


def _choose(
    kept: set[Any],
    matmuls: set[Any],
    fraction: float,
    counts: dict[bool, int],
    context: SelectiveCheckpointContext,
    operator: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    """Forward and recomputation count their matrix products alike, so both choose the same ones."""
    if operator not in kept:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operator in matmuls:
        count = counts[context.is_recompute]
        counts[context.is_recompute] += 1
        if int((count + 1) * fraction) == int(count * fraction):
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE
