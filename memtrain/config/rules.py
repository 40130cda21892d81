"""What excludes what. A rule raises UserError, with key and remedy, before anything is allocated."""

import re
from collections.abc import Callable

from memtrain.config.derived import (
    blocks_with,
    named_blocks,
    offloads_activations,
    optimizer_home,
    resolved_n_kv_heads,
    selective_blocks,
    weights_home,
)
from memtrain.config.published import is_published
from memtrain.config.tree import Config
from memtrain.errors import UserError


def _card_has_room(config: Config) -> None:
    if config.gpu.context_mib >= config.gpu.memory_mib:
        raise UserError(
            f"gpu.context_mib={config.gpu.context_mib}: leaves nothing of gpu.memory_mib="
            f"{config.gpu.memory_mib}; lower it, or choose a card of conf/gpu"
        )


def _heads_divide_width(config: Config) -> None:
    model = config.model
    if is_published(config):
        return
    head_dim = model.head_dim or model.dim // model.n_heads
    if model.head_dim is None and model.dim % model.n_heads:
        raise UserError(
            f"model.dim={model.dim}: not divisible by model.n_heads={model.n_heads}; change one of them"
        )
    if model.n_heads % resolved_n_kv_heads(model):
        raise UserError(
            f"model.n_kv_heads={model.n_kv_heads}: does not divide model.n_heads={model.n_heads}"
        )
    if model.positions == "rope" and head_dim % 2:
        raise UserError(
            f"model.positions=rope: needs an even head width, got model.dim={model.dim} / "
            f"model.n_heads={model.n_heads} = {head_dim}"
        )


def _sequence_fits_positions(config: Config) -> None:
    if not is_published(config) and config.seq_len > config.model.max_seq_len:
        raise UserError(
            f"seq_len={config.seq_len}: longer than model.max_seq_len={config.model.max_seq_len}; "
            "lower seq_len or raise model.max_seq_len"
        )


def _paths_are_given(config: Config) -> None:
    if config.data.source in ("text", "jsonl", "tokens") and not config.data.path:
        raise UserError(
            f"data.path: data={config.data.source} needs it, as in data.path=corpus.txt"
        )
    if config.data.source == "tokens" and not isinstance(config.data.path, str):
        raise UserError("data.path: data=tokens takes one token file")
    if config.data.path and config.data.source not in ("text", "jsonl", "tokens"):
        raise UserError(
            f"data.path: data={config.data.source} reads no path; use data=text, data=jsonl or data=tokens"
        )
    if config.tokenizer.path and config.tokenizer.kind != "file":
        raise UserError(
            f"tokenizer.path: tokenizer={config.tokenizer.kind} reads no path; use tokenizer=file"
        )
    if config.tokenizer.kind == "file" and not config.tokenizer.path:
        raise UserError(
            "tokenizer.path: tokenizer=file needs it, as in tokenizer.path=tokenizer.json"
        )


def _length_is_said_once(config: Config) -> None:
    if config.epochs is None:
        if config.steps is None:
            raise UserError("steps=null: set steps or epochs to a number")
        return
    key = f"epochs={config.epochs:g}"
    if config.steps is not None:
        raise UserError(
            f"{key}: steps={config.steps} also sets the length; set one of the two to null"
        )
    if config.data.source == "random":
        raise UserError(f"{key}: data=random has no end; use steps")


def _betas_are_two(config: Config) -> None:
    if len(config.optimizer.betas) != 2 or max(config.optimizer.betas) >= 1:
        raise UserError(
            f"optimizer.betas={config.optimizer.betas}: must be two numbers from 0 to below 1"
        )


def folder_name(name: object) -> str:
    """`name` if a folder may be called so. Raises UserError else."""
    if not re.fullmatch(r"\w[\w.-]*", str(name), re.ASCII):
        raise UserError(
            f"name={name!r}: it names a folder, so only letters, digits, '-', '_' and '.' inside"
        )
    return str(name)


def _name_is_a_folder(config: Config) -> None:
    folder_name(config.name)


def _sqrt_sets_segments(config: Config) -> None:
    if config.checkpointing.policy == "sqrt" and config.checkpoint_every:
        raise UserError(
            f"checkpoint_every={config.checkpoint_every}: checkpointing=sqrt chooses it; drop one of the two"
        )


def _blocks_are_named(config: Config) -> None:
    n_layers = config.model.n_layers
    for key, text in (
        ("checkpointing.blocks", config.checkpointing.blocks),
        ("offload.blocks", config.offload.blocks),
        ("model.mlp_chunk_blocks", config.model.mlp_chunk_blocks),
        ("model.window_layers", config.model.window_layers),
        ("model.no_rope_layers", config.model.no_rope_layers),
    ):
        if text is not None:
            named_blocks(text, n_layers, key)
    given = config.checkpointing.per_block
    if config.checkpointing.policy == "per_block" and len(given) != n_layers:
        raise UserError(
            f"checkpointing.per_block: {len(given)} entries for {n_layers} layers; give one for each"
        )


def _policies_do_not_collide(config: Config) -> None:
    policy = config.checkpointing.policy
    if policy in ("per_block", "budget") and offloads_activations(config):
        raise UserError(
            f"offload={config.offload.mode}: checkpointing={policy} chooses it per block; drop one of the two"
        )
    if policy in ("selective", "per_block", "budget") and config.checkpoint_every:
        raise UserError(
            f"checkpoint_every={config.checkpoint_every}: has no meaning with checkpointing={policy}; drop it"
        )
    if policy == "budget" and config.task == "numerics":
        raise UserError("checkpointing=budget: plans a training run; drop it for task=numerics")


def _mlp_chunks_are_pieces(config: Config) -> None:
    chunks = config.model.mlp_chunks
    if chunks > config.seq_len:
        raise UserError(
            f"model.mlp_chunks={chunks}: more pieces than seq_len={config.seq_len} tokens"
        )
    chunked = named_blocks(
        config.model.mlp_chunk_blocks, config.model.n_layers, "model.mlp_chunk_blocks"
    )
    if chunks > 1 and selective_blocks(config).intersection(chunked):
        raise UserError(
            f"model.mlp_chunks={chunks}: with checkpointing={config.checkpointing.policy} products of a block would be "
            "kept and computed again; use one of the two, or other blocks in model.mlp_chunk_blocks"
        )


def _hf_is_named(config: Config) -> None:
    model = config.model
    if not is_published(config):
        if config.tokenizer.kind == "model":
            raise UserError(
                "tokenizer=model: needs model=hf model.path=DIR; use bpe, bytes or file"
            )
        return
    if not model.path and not model.config:
        raise UserError("model.path: model=hf needs it, as in model.path=DIR")
    if model.path and model.config:
        raise UserError("model.config: model.path has a config of its own; drop one of the two")
    if model.config and config.task != "plan":
        raise UserError(
            f"model.config: can be planned, not run; use task=plan instead of task={config.task}, or model.path"
        )


def _adapter_fits(config: Config) -> None:
    adapter, key = config.adapter, f"adapter={config.adapter.name}"
    if adapter.name == "none":
        if adapter.path:
            raise UserError("adapter.path: adapter=none reads none; use adapter=lora or qlora")
        return
    if config.task == "train" and not is_published(config):
        raise UserError(
            f"{key}: sits on a trained model; use model=hf model.path=DIR (task=plan takes any model)"
        )
    if config.model.train_only is not None:
        raise UserError(f"model.train_only: {key} freezes the model; use adapter.also_train")
    if config.task == "numerics":
        raise UserError(f"{key}: task=numerics looks at the gradients of all weights; drop it")
    if config.compile != "off":
        raise UserError(f"{key}: cannot be compiled; use compile=off")
    if config.optimizer.name == "muon":
        raise UserError(f"{key}: muon is made for hidden matrices, not for adapters; use adamw")


def _random_has_no_text(config: Config) -> None:
    if config.data.source == "random" and config.task == "generate":
        raise UserError("task=generate: needs a run on text; drop data=random")


def _documents_are_marked(config: Config) -> None:
    if not config.data.document_mask:
        return
    if config.data.source != "jsonl":
        raise UserError(
            f"data.document_mask=true: data={config.data.source} marks no documents; use data=jsonl or drop it"
        )


def _compiles_with(config: Config) -> None:
    """Offload waits for streams, which cannot be traced; a compiled block hides its operators from `selective`."""
    policy = config.checkpointing.policy
    key = f"compile={config.compile}"
    if config.compile == "off":
        return
    if policy == "budget":
        raise UserError(f"{key}: checkpointing=budget plans a run as eager; drop one of the two")
    if config.compile == "model" and (
        offloads_activations(config) or blocks_with(config, "offload")
    ):
        raise UserError(f"{key}: cannot trace the offload of activations; use compile=blocks")
    if weights_home(config) != "device":
        raise UserError(
            f"{key}: cannot trace weights that come and go; drop it, or use offload=optimizer"
        )
    if config.compile == "blocks" and (policy == "selective" or blocks_with(config, "selective")):
        raise UserError(
            f"{key}: hides its operators from selective recomputation; use compile=model"
        )


ELEMENTWISE = ("adamw", "lion", "sgd")
"""Optimizers whose state is fp32, entry by entry: any part of a parameter can be stepped by itself."""


def _checkpoints_can_be_kept(config: Config) -> None:
    if config.keep == 0:
        raise UserError("keep=0: keeps no checkpoint; use 1 or more, or -1 for all")
    if config.resume == "":
        raise UserError("resume=: is empty; name a run's folder or a checkpoint's, or latest")
    if config.resume is not None and config.task != "train":
        raise UserError(f"resume={config.resume}: task={config.task} trains nothing; drop it")


def _offload_is_complete(config: Config) -> None:
    offload = config.offload
    key = f"offload={offload.mode}"
    if offload.mode.endswith("_nvme") and not offload.nvme_dir:
        raise UserError(f"{key}: needs a folder for its files, as in offload.nvme_dir=/mnt/nvme")
    if optimizer_home(config) == "device":
        return
    if optimizer_home(config) == "nvme" and config.optimizer.name not in ELEMENTWISE:
        raise UserError(
            f"{key}: files are stepped in pieces, optimizer={config.optimizer.name} is not made for that; "
            f"use {', '.join(ELEMENTWISE)}"
        )
    if config.task == "numerics":
        raise UserError(f"{key}: task=numerics looks at gradients on the device; drop it")


def _masters_are_optional_here(config: Config) -> None:
    if config.precision.master_weights:
        return
    key = "precision.master_weights=false"
    if config.precision.name != "bf16_true":
        raise UserError(
            f"{key}: precision={config.precision.name} has no second copy of the weights; "
            "use precision=bf16_true"
        )
    if optimizer_home(config) != "device":
        raise UserError(
            f"{key}: offload={config.offload.mode} keeps fp32 masters on the host; drop one of the two"
        )


def _steps_in_backward(config: Config) -> None:
    if not config.optimizer.in_backward:
        return
    key = "optimizer.in_backward=true"
    if optimizer_home(config) != "device":
        raise UserError(
            f"{key}: offload={config.offload.mode} already frees gradients in backward; drop one of the two"
        )
    if config.accum > 1:
        raise UserError(
            f"{key}: accum={config.accum} adds gradients up before the step; use accum=1, or "
            "offload=optimizer offload.gradients=true, which adds them up on the host"
        )
    if config.precision.name == "fp16" and config.optimizer.in_backward_clip == "per_parameter":
        raise UserError(
            f"{key}: precision=fp16 has to know that no gradient overflowed; "
            "use optimizer.in_backward_clip=two_pass"
        )
    if config.task == "numerics":
        raise UserError(f"{key}: task=numerics looks at gradients; drop it")


def _not_built_yet(config: Config) -> None:
    for key, value, refused in (("precision", config.precision.name, ("fp8",)),):
        if value in refused:
            raise UserError(f"{key}={value}: not available in this version")


RULES: tuple[Callable[[Config], None], ...] = (
    _not_built_yet,
    _name_is_a_folder,
    _card_has_room,
    _heads_divide_width,
    _sequence_fits_positions,
    _paths_are_given,
    _length_is_said_once,
    _betas_are_two,
    _sqrt_sets_segments,
    _random_has_no_text,
    _documents_are_marked,
    _hf_is_named,
    _adapter_fits,
    _mlp_chunks_are_pieces,
    _compiles_with,
    _blocks_are_named,
    _policies_do_not_collide,
    _checkpoints_can_be_kept,
    _offload_is_complete,
    _masters_are_optional_here,
    _steps_in_backward,
)
