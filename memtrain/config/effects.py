"""Switches that are set but change nothing here, and others that a user should hear of."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from memtrain.cards import CONF_DIR, load_yaml
from memtrain.config.derived import (
    blocks_with,
    last_segment,
    offloaded_blocks,
    offloads_activations,
    optimizer_home,
    segment_blocks,
    weights_home,
)
from memtrain.config.model import ModelConfig
from memtrain.config.published import is_published
from memtrain.config.tree import Config

# Key, what it is for, whether this config has that. A key set to something else than its default warns without it.
EFFECTS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("precision.tf32", "precision=fp32", lambda c: c.precision.name == "fp32"),
    (
        "precision.loss_scale",
        "precision=fp16 or task=numerics",
        lambda c: c.precision.name == "fp16" or c.task == "numerics",
    ),
    ("precision.scale_growth_every", "precision=fp16", lambda c: c.precision.name == "fp16"),
    (
        "optimizer.implementation",
        "optimizer=adamw or sgd",
        lambda c: c.optimizer.name in ("adamw", "sgd"),
    ),
    (
        "optimizer.momentum",
        "optimizer=sgd or muon",
        lambda c: c.optimizer.name in ("sgd", "muon"),
    ),
    (
        "optimizer.betas",
        "optimizer=adamw, adamw_8bit, paged_adamw_8bit, lion or muon",
        lambda c: c.optimizer.name not in ("sgd", "adafactor"),
    ),
    (
        "optimizer.eps",
        "optimizer=adamw, adamw_8bit, paged_adamw_8bit or muon",
        lambda c: c.optimizer.name in ("adamw", "adamw_8bit", "paged_adamw_8bit", "muon"),
    ),
    ("schedule.min_ratio", "schedule=cosine or linear", lambda c: c.schedule.name != "constant"),
    ("model.rope_theta", "model.positions=rope", lambda c: c.model.positions == "rope"),
    ("model.mlp_chunk_blocks", "model.mlp_chunks above 1", lambda c: c.model.mlp_chunks > 1),
    ("model.dropout", "task=train or plan", lambda c: c.task in ("train", "plan")),
    ("data.vocab_size", "data=random", lambda c: c.data.source == "random"),
    ("data.shuffle", "data=stdlib, text, jsonl or tokens", lambda c: c.data.source != "random"),
    (
        "tokenizer.vocab_size",
        "tokenizer=bpe on a text",
        lambda c: c.tokenizer.kind == "bpe" and _has_text(c),
    ),
    (
        "tokenizer.end_of_text",
        "tokenizer=file or model",
        lambda c: c.tokenizer.kind in ("file", "model"),
    ),
    ("offload.min_tensor_bytes", "offloaded activations", lambda c: _offloads_activations(c)),
    (
        "offload.activations_fraction",
        "offload=activations, all or all_nvme",
        lambda c: offloads_activations(c),
    ),
    ("offload.blocks", "offload=activations, all or all_nvme", lambda c: offloads_activations(c)),
    (
        "offload.gradients",
        "offload=optimizer or optimizer_nvme",
        lambda c: _has_device_weights_alone(c),
    ),
    (
        "offload.optimizer_fraction",
        "offload=optimizer or optimizer_nvme",
        lambda c: _has_device_weights_alone(c),
    ),
    (
        "offload.nvme_dir",
        "offload=optimizer_nvme, params_nvme or all_nvme",
        lambda c: optimizer_home(c) == "nvme",
    ),
    (
        "offload.nvme_buffer_mib",
        "offload=optimizer_nvme, params_nvme or all_nvme",
        lambda c: optimizer_home(c) == "nvme",
    ),
    (
        "optimizer.in_backward_clip",
        "optimizer.in_backward=true",
        lambda c: c.optimizer.in_backward,
    ),
    ("loss.chunk_mib", "loss=chunked", lambda c: c.loss.name == "chunked"),
    (
        "checkpointing.keep",
        "checkpointing=selective, budget or per_block with a selective block",
        lambda c: _selects(c),
    ),
    (
        "checkpointing.matmul_fraction",
        "matmul in checkpointing.keep and a block that is recomputed selectively",
        lambda c: _selects(c) and "matmul" in c.checkpointing.keep,
    ),
    (
        "checkpointing.per_block",
        "checkpointing=per_block",
        lambda c: c.checkpointing.policy == "per_block",
    ),
    (
        "checkpointing.budget_gib",
        "checkpointing=budget",
        lambda c: c.checkpointing.policy == "budget",
    ),
    ("checkpointing.blocks", "blocks that are recomputed", lambda c: _recomputes_named_blocks(c)),
    *(
        (f"adapter.{key}", "adapter=lora or qlora", lambda c: c.adapter.name != "none")
        for key in (
            "rank",
            "alpha",
            "dropout",
            "targets",
            "rslora",
            "dora",
            "also_train",
            "base_dtype",
        )
    ),
    ("adapter.double_quantization", "adapter=qlora", lambda c: c.adapter.name == "qlora"),
    ("model.window_layers", "model.window", lambda c: c.model.window is not None),
    ("model.no_rope_layers", "model.positions=rope", lambda c: c.model.positions == "rope"),
    ("model.backend", "model=hf", is_published),
    ("export.run", "task=export", lambda c: c.task == "export"),
    ("export.path", "task=export", lambda c: c.task == "export"),
    ("export.merge", "task=export", lambda c: c.task == "export"),
    ("export.dtype", "task=export", lambda c: c.task == "export"),
    ("generate.run", "task=generate", lambda c: c.task == "generate"),
    ("numerics.steps", "task=numerics", lambda c: c.task == "numerics"),
    ("sweep.resume", "-m", lambda c: False),
)


def _has_text(config: Config) -> bool:
    return config.data.source in ("stdlib", "text", "jsonl")


def _selects(config: Config) -> bool:
    return config.checkpointing.policy in ("selective", "budget") or bool(
        blocks_with(config, "selective")
    )


def _offloads_activations(config: Config) -> bool:
    by_block = config.checkpointing.policy == "budget" or bool(blocks_with(config, "offload"))
    return offloads_activations(config) or by_block


def _has_device_weights_alone(config: Config) -> bool:
    return optimizer_home(config) != "device" and weights_home(config) == "device"


def _recomputes_named_blocks(config: Config) -> bool:
    return config.checkpointing.policy == "selective" or segment_blocks(config) > 0


def no_effect_warnings(config: Config) -> list[str]:
    """Switches that are set but change nothing here, one line each."""
    defaults = load_yaml(CONF_DIR / "config.yaml")
    found = []
    for key, needed, has in EFFECTS:
        group, name = key.split(".")
        if group == "model" and is_published(config):
            continue
        value = getattr(getattr(config, group), name)
        if value != defaults[group][name] and not has(config):
            shown = str(value).lower() if isinstance(value, bool) else value
            found.append(f"{key}={shown} has no effect without {needed}")
    if is_published(config):
        found += _unused_by_hf(config.model, defaults["model"])
    return [
        *found,
        *_offload_warnings(config),
        *_segment_warnings(config),
        *warmup_warnings(config),
        *_compile_warnings(config),
    ]


def _offload_warnings(config: Config) -> list[str]:
    found = []
    if (wanted := offloaded_blocks(config)) is not None and not wanted - last_segment(config):
        found.append(_moves_nothing(config))
    if config.optimizer.name == "paged_adamw_8bit":
        key = "device=cpu" if config.device == "cpu" else f"offload={config.offload.mode}"
        if config.device == "cpu" or optimizer_home(config) != "device":
            found.append(f"optimizer=paged_adamw_8bit pages nothing with {key}")
    if config.offload.gradients and config.accum == 1 and _has_device_weights_alone(config):
        found.append(
            "offload.gradients=true changes nothing with accum=1: gradients leave in every backward then"
        )
    return found


def _segment_warnings(config: Config) -> list[str]:
    found = []
    if config.checkpointing.policy == "alternate" and config.checkpoint_every <= 1:
        found.append("checkpointing=alternate recomputes nothing with checkpoint_every below 2")
    if config.checkpoint_every > config.model.n_layers:
        found.append(
            f"checkpoint_every={config.checkpoint_every} is one segment: the model has {config.model.n_layers} layers"
        )
    return found


def warmup_warnings(config: Config) -> list[str]:
    """Where `steps` are known."""
    warmup, steps = config.schedule.warmup, config.steps
    if steps is None or warmup < steps or config.task != "train":
        return []
    return [f"schedule.warmup={warmup} never ends in steps={steps}: the learning rate only rises"]


USED_BY_HF = (
    *("path", "config", "backend", "dropout", "mlp_chunks", "mlp_chunk_blocks", "train_only"),
    *("n_layers", "max_seq_len"),
)
"""Keys of `model` that a published model does not answer itself, and those that were set from its config."""


def _unused_by_hf(model: ModelConfig, defaults: dict[str, Any]) -> list[str]:
    changed = [
        f"model.{key}={value}"
        for key, value in asdict(model).items()
        if key not in USED_BY_HF and value != defaults[key]
    ]
    return [f"{setting} has no effect with model=hf" for setting in changed]


def _moves_nothing(config: Config) -> str:
    key = f"offload={config.offload.mode}"
    if not offloads_activations(config):
        key = f"checkpointing.per_block=[{','.join(config.checkpointing.per_block)}]"
    return (
        f"{key} moves no activations: those of the last segment (block "
        f"{min(last_segment(config))} on) never leave, and no other block is chosen"
    )


def _compile_warnings(config: Config) -> list[str]:
    if config.compile == "off":
        return []
    if config.task == "generate":
        return [f"compile={config.compile} has no effect with task=generate"]
    if config.task == "plan" or (config.task == "train" and config.plan == "on"):
        bound = "an upper bound but for the gradients of one block"
        if config.compile == "model" and config.accum > 1:
            bound = "too low by the gradients, which exist twice with accum above 1; compile=blocks avoids it"
        return [f"compile={config.compile} is planned as eager: {bound}"]
    return []
