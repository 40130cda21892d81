"""What a training run says before its first step."""

import torch

from memtrain.config import Config
from memtrain.config.derived import segment_blocks
from memtrain.data.packing import Packed
from memtrain.data.prepare import Data
from memtrain.device import describe_device
from memtrain.engine.pretrained import Published
from memtrain.model.language_model import LanguageModel
from memtrain.model.transformer import count_parameters
from memtrain.units import format_count


def header(config: Config, model: LanguageModel, device: torch.device, windows: int) -> list[str]:
    """What is about to run, in the words of the four switches."""
    d = model.dimensions
    n_parameters = count_parameters(model)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = f" ({format_count(n_trained)} trained)" if n_trained < n_parameters else ""
    tokens = format_count(config.micro_batch * config.seq_len * config.accum)
    padded = " with padding" if config.data.source == "jsonl" else ""
    precision = config.precision.name
    lines = [
        f"model      {format_count(n_parameters)} parameters{trained} · {d.n_layers} layers x {d.dim} wide · "
        f"vocabulary {d.vocab_size} · on {describe_device(device)}",
        f"step       {config.accum} x {config.micro_batch} x {config.seq_len} = {tokens} tokens{padded} · "
        f"{windows} steps an epoch · {config.optimizer.name} lr {config.optimizer.lr:g}",
        f"switches   precision={precision} accum={config.accum} "
        f"checkpoint_every={segment_blocks(config)} offload={config.offload.mode}"
        f"{''.join(f' {text}' for text in further_switches(config))}",
    ]
    if precision in ("bf16", "fp16"):
        lines.append(
            f"           {precision} is what is computed in: weights, gradients and moments stay fp32"
        )
    if config.optimizer.in_backward:
        lines.append(f"           {IN_BACKWARD[config.optimizer.in_backward_clip]}")
    return lines


def published_line(found: Published) -> str:
    who = (
        f"memtrain's Transformer as {found.family.name}"
        if found.family
        else "transformers' own model"
    )
    return f"base       {found.path} · {who}: {found.why}"


IN_BACKWARD = {
    "two_pass": "gradients are made twice, first for their norm: exact, at the price of a second forward and backward",
    "per_parameter": "each gradient is clipped by its own norm, and skipped by itself if it is not finite",
}


def document_figures(packed: Packed) -> dict[str, float]:
    return {
        "documents": packed.n_documents,
        "rows": packed.n_rows,
        "padding_share": packed.padding_share,
        "target_share": packed.target_share,
    }


def data_lines(data: Data) -> list[str]:
    """How much there is to learn from, and how documents fill their rows; random tokens never end."""
    if data.train is None:
        return []
    if not isinstance(data.train, Packed):
        held_out = 0 if data.val is None or isinstance(data.val, Packed) else len(data.val)
        counts = f"{format_count(len(data.train))} tokens · {format_count(held_out)} held out"
        return [f"data       {counts} for validation"]
    packed = data.train
    apart = "kept apart" if packed.keep_apart else "one sees those before it in its row"
    return [
        f"documents  {packed.n_documents} in {packed.n_rows} rows of {packed.seq_len} · "
        f"{packed.padding_share:.1%} padding · {packed.target_share:.1%} targets · {apart}"
    ]


def further_switches(config: Config) -> list[str]:
    """Those that are not at their default."""
    chosen = (
        ("checkpointing", config.checkpointing.policy, "segments"),
        ("compile", config.compile, "off"),
        ("model.mlp_chunks", config.model.mlp_chunks, 1),
        ("loss", config.loss.name, "chunked"),
        ("offload.gradients", str(config.offload.gradients).lower(), "false"),
        ("offload.optimizer_fraction", config.offload.optimizer_fraction, 1.0),
        ("precision.master_weights", str(config.precision.master_weights).lower(), "true"),
        ("precision.gradients", config.precision.gradients, None),
        ("optimizer.in_backward", str(config.optimizer.in_backward).lower(), "false"),
        ("model.train_only", config.model.train_only, None),
    )
    return [f"{key}={value}" for key, value, default in chosen if value != default]
