"""Recomputation (activation checkpointing, Chen et al. 2016): keep the input of a segment, run it again in backward."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memtrain.model.language_model import LanguageModel, Segment

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes the contexts of a segment's forward and of its recomputation: what decides what is kept."""


def recompute(
    model: LanguageModel, chosen: Collection[int], every: int, contexts: Contexts | None = None
) -> None:
    """Up to `every` consecutive segments whose blocks are `chosen` become one, of which only the input is kept.

    Non-reentrant, random state preserved: gradients are bit-equal to those without.
    """
    old = model.segments
    wanted = [index for index, segment in enumerate(old) if set(segment.blocks) <= set(chosen)]
    model.segments = [
        joined([old[index] for index in group], contexts) if group[0] in wanted else old[group[0]]
        for group in groups(len(old), wanted, every)
    ]


def joined(segments: Sequence[Segment], contexts: Contexts | None) -> Segment:
    blocks = [index for segment in segments for index in segment.blocks]
    run = partial(checkpoint, partial(_run, segments), use_reentrant=False)
    if contexts:  # left out where it is the default: torch.compile cannot trace that
        run = partial(run, context_fn=contexts)
    return Segment(blocks, run)


def groups(count: int, chosen: Collection[int], every: int) -> Iterator[list[int]]:
    """0 to count - 1 in order: runs of chosen ones, cut after `every`; the others one by one."""
    group: list[int] = []
    for index in range(count):
        if group and (index not in chosen or group[-1] not in chosen or len(group) == every):
            yield group
            group = []
        group.append(index)
    yield group


def _run(segments: Sequence[Segment], x: Tensor, *shared: Any) -> Tensor:
    for segment in segments:
        x = segment(x, *shared)
    return x
