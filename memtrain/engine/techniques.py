"""The techniques that change a model: `TECHNIQUES` in the order in which they wrap it. One entry is one technique."""

import fnmatch
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from memtrain.config.derived import blocks_with, named_blocks, offloaded_blocks, segment_blocks
from memtrain.config.tree import Config
from memtrain.engine.adapt import trained_beside
from memtrain.errors import UserError
from memtrain.memory.activation_offload import ActivationOffload
from memtrain.memory.compiled import compile_blocks, compile_training
from memtrain.memory.mlp_chunks import chunk_mlps
from memtrain.memory.param_offload import ParamOffload
from memtrain.memory.recompute import recompute
from memtrain.memory.selective import selective_contexts
from memtrain.model.language_model import LanguageModel
from memtrain.model.transformer import Transformer


def apply_train_only(config: Config, model: LanguageModel) -> None:
    """Freeze what is not named, and say what the gradients of the rest are kept in."""
    beside_a_base = config.adapter.name != "none"
    chosen = trained_beside(config, model) if beside_a_base else trained_names(config, model)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(config.precision.gradients or "")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
        if wanted is not None and parameter.requires_grad:
            parameter.grad_dtype = wanted


def trained_names(config: Config, model: LanguageModel) -> set[str]:
    """Raises UserError for a part of `model.train_only` that names no parameter."""
    names = [name for name, _ in model.named_parameters()]
    if config.model.train_only is None:
        return set(names)
    found: set[str] = set()
    for part in str(config.model.train_only).split(","):
        named = named_parameters(part.strip(), model)
        if not named:
            raise UserError(
                f"model.train_only={part.strip()}: names no parameter; use blocks (last 2, 0-3) or patterns such as "
                f"{names[0]} or *.mlp.*"
            )
        found |= named
    return found


def named_parameters(part: str, model: LanguageModel) -> set[str]:
    """By blocks, or by a pattern of names."""
    names = dict(model.named_parameters())
    if re.fullmatch(r"all|\d+(-\d+)?|(every|first|last) \d+", part):
        chosen = named_blocks(part, len(model.blocks), "model.train_only")
        inside = {p for index in chosen for p in model.blocks[index].parameters()}
        return {name for name, parameter in names.items() if parameter in inside}
    return set(fnmatch.filter(names, part))


def apply_mlp_chunks(config: Config, model: LanguageModel) -> None:
    if config.model.mlp_chunks > 1 and isinstance(model, Transformer):
        blocks = named_blocks(config.model.mlp_chunk_blocks, len(model.blocks), "")
        chunk_mlps(model, config.model.mlp_chunks, blocks)


def apply_recompute(config: Config, model: LanguageModel) -> None:
    """Put segments in the place of the blocks, as `checkpointing` and `checkpoint_every` say."""
    wanted, every = config.checkpointing, segment_blocks(config)
    chosen = named_blocks(wanted.blocks, len(model.blocks), "")
    contexts = partial(selective_contexts, wanted.keep, wanted.matmul_fraction)
    if wanted.policy == "selective":
        recompute(model, chosen, 1, contexts)
    elif wanted.policy == "per_block":
        recompute(model, sorted(blocks_with(config, "recompute")), 1)
        recompute(model, sorted(blocks_with(config, "selective")), 1, contexts)
    elif wanted.policy == "alternate" and every:
        recompute(model, [index for index in chosen if index % every], 1)
    elif every:
        recompute(model, chosen, every)


def apply_activation_offload(config: Config, model: LanguageModel) -> None:
    """Wrap the segments whose saved tensors wait on the host; those of the last one never do."""
    chosen = offloaded_blocks(config)
    if not chosen:
        return
    offload = ActivationOffload(model, config.offload.min_tensor_bytes)
    last = len(model.segments) - 1
    for index, segment in enumerate(model.segments):  # all: what stays, too, tells when to fetch
        kept = index == last or not chosen.intersection(segment.blocks)
        model.segments[index] = offload.wrap(segment, keep=kept)


def apply_param_offload(config: Config, model: LanguageModel) -> None:
    if isinstance(model.elsewhere, ParamOffload):
        check_front(config, model)
        model.elsewhere.wrap(model)


def check_front(config: Config, model: LanguageModel) -> None:
    """What is in no layer is gone after the first one. Raises UserError where that is more than embeddings."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    front = {p for p in model.front_parameters() if p.ndim >= 2} - tables
    names = [name for name, parameter in model.named_parameters() if parameter in front]
    if names:
        raise UserError(
            f"offload={config.offload.mode}: {names[0]} is in no layer of the model; use offload=optimizer"
        )


def apply_compile(config: Config, model: LanguageModel) -> None:
    if config.compile == "blocks":
        compile_blocks(model)
    elif config.compile == "model":
        compile_training(model)


TECHNIQUES: tuple[Callable[[Config, LanguageModel], None], ...] = (
    apply_train_only,
    apply_mlp_chunks,
    apply_recompute,
    apply_activation_offload,
    apply_param_offload,
    apply_compile,
)
"""In the order in which they wrap a model, from the inside out."""
