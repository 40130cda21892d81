"""Config to objects: the only place where the config tree becomes data, model, optimizer and step."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.amp import GradScaler

from memtrain.config import Config
from memtrain.config.derived import (
    blocks_with,
    named_blocks,
    offloaded_blocks,
    resolve_path,
    resolved_n_kv_heads,
    segment_blocks,
    weights_home,
)
from memtrain.config.tree import TokenizerConfig
from memtrain.data import corpus, store
from memtrain.data.loader import (
    Batch,
    Batching,
    Windows,
)
from memtrain.data.prepare import (
    Cache,
    Data,
    ProgressFor,
    Rows,
    Vocabulary,
    check_lengths,
    known_tokenizer,
    open_token_file,
    random_data,
    tokenize_documents,
    tokenize_text,
)
from memtrain.data.tokenizer import (
    EncodeError,
    Tokenizer,
)
from memtrain.engine.build_updates import build_updates, file_store
from memtrain.engine.schedule import Schedule, make_schedule
from memtrain.engine.step import TrainStep
from memtrain.errors import UserError
from memtrain.memory.activation_offload import ActivationOffload
from memtrain.memory.compiled import compile_blocks, compile_training
from memtrain.memory.file_homes import FileWeights
from memtrain.memory.mlp_chunks import chunk_mlps
from memtrain.memory.param_offload import MemoryWeights, ParamOffload
from memtrain.memory.recompute import recompute
from memtrain.memory.selective import selective_contexts
from memtrain.model.hf import HFCausalLM, LanguageModel, make_hf_model
from memtrain.model.loss import LossFunction, Terms, chunked_loss, full_loss
from memtrain.model.transformer import Dimensions, Transformer, make_transformer
from memtrain.units import MIB

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- data ---------------------------------------------------------------------------------------------------------


def build_data(config: Config, base: Path, progress: ProgressFor) -> Data:
    """Tokenize or open what `data` names. Raises UserError for what cannot be read or is too short."""
    rows = Rows(config.seq_len, config.data.val_fraction)
    data = _read_data(config, base, progress, rows)
    if config.data.path:
        data.name = f"the training text (data.path={config.data.path})"
    if config.data.val_fraction == 0:
        data.val = None
    check_lengths(data, rows)
    if data.tokenizer and config.generate.tokens:
        prompt_ids(config, data.tokenizer)
    return data


def _read_data(config: Config, base: Path, progress: ProgressFor, rows: Rows) -> Data:
    wanted = config.data
    if wanted.source == "random":
        return random_data(wanted.vocab_size, config.eval_sequences, rows.seq_len, config.seed)
    if wanted.source == "tokens":
        assert isinstance(wanted.path, str)
        path = resolve_path(wanted.path, base)
        return open_token_file(path, rows, config.model.vocab_size)
    cache = Cache(resolve_path(wanted.cache_dir, base), progress)
    vocabulary = build_vocabulary(config.tokenizer, base)
    if wanted.source == "stdlib":
        return tokenize_text(corpus.stdlib_files(), vocabulary, rows, cache)
    assert wanted.path
    paths = [wanted.path] if isinstance(wanted.path, str) else wanted.path
    if wanted.source == "text":
        return tokenize_text(corpus.text_files(paths, base, ""), vocabulary, rows, cache)
    files = corpus.text_files(paths, base, ".jsonl")
    return tokenize_documents(files, vocabulary, rows, cache, wanted.document_mask)


def build_vocabulary(tokenizer: TokenizerConfig, base: Path) -> Vocabulary:
    path = resolve_path(tokenizer.path, base) if tokenizer.path else None
    return Vocabulary(tokenizer.kind, tokenizer.vocab_size, path, tokenizer.end_of_text)


def prompt_ids(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Raises UserError for a prompt that cannot be encoded: before the training that it is to end."""
    try:
        return tokenizer.encode([config.generate.prompt])[0].tolist() or [tokenizer.end_of_text_id]
    except EncodeError as error:
        raise UserError(f"generate.prompt={config.generate.prompt!r}: {error}") from error


def expected_vocab_size(config: Config, base: Path) -> int:
    """The data's vocabulary, without reading the text: for planning."""
    if config.data.source == "random":
        return config.data.vocab_size
    if config.data.source == "tokens":
        assert isinstance(config.data.path, str)
        return store.open_tokens(resolve_path(config.data.path, base)).vocab_size
    if config.tokenizer.kind == "bpe":
        return config.tokenizer.vocab_size
    return known_tokenizer(build_vocabulary(config.tokenizer, base)).vocab_size


def build_loader(config: Config, data: Data, device: torch.device) -> Windows:
    return data.windows(
        Batching(
            config.micro_batch,
            config.accum,
            config.seed,
            shuffle=config.data.shuffle,
            pin=device.type == "cuda",
            prefetch=config.data.prefetch,
        )
    )


def validation_batches(config: Config, data: Data) -> Iterator[Batch]:
    return data.validation_batches(config.micro_batch, config.eval_sequences)


# --- model, optimizer, step ---------------------------------------------------------------------------------------


def build_dimensions(config: Config, vocab_size: int) -> Dimensions:
    """`vocab_size` is the data's. Raises UserError where the model's own is smaller."""
    model = config.model
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size}: the data has ids up to {vocab_size - 1}; "
            "raise it, set it to null, or lower tokenizer.vocab_size"
        )
    return Dimensions(
        vocab_size=model.vocab_size or vocab_size,
        dim=model.dim,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=resolved_n_kv_heads(model),
        ffn_dim=model.ffn_dim or 4 * model.dim,
        max_seq_len=model.max_seq_len,
        norm=model.norm,
        norm_eps=model.norm_eps,
        activation=model.activation,
        positions=model.positions,
        rope_theta=model.rope_theta,
        tied=model.tied,
        bias=model.bias,
        qkv_bias=model.bias if model.qkv_bias is None else model.qkv_bias,
        dropout=model.dropout,
    )


def weight_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.precision.name == "bf16_true" else torch.float32


def build_hf_model(config: Config, device: torch.device) -> HFCausalLM:
    assert config.model.config
    recompute = bool(segment_blocks(config))
    return make_hf_model(Path(config.model.config), recompute, device, weight_dtype(config))


def build_model(config: Config, dimensions: Dimensions, device: torch.device) -> Transformer:
    """Weights go where they live as they are made; then `TECHNIQUES` change the model, one after the other."""
    offload = build_param_offload(config, device)
    place = offload.place if offload else lambda parameter: None
    model = make_transformer(dimensions, device, weight_dtype(config), place=place)
    model.elsewhere = offload
    for apply in TECHNIQUES:
        apply(config, model)
    return model


def build_param_offload(config: Config, device: torch.device) -> ParamOffload | None:
    home = weights_home(config)
    if home == "device":
        return None
    in_files = home == "nvme"
    store = FileWeights(file_store(config), device) if in_files else MemoryWeights(device)
    return ParamOffload(device, store)


def apply_train_only(config: Config, model: LanguageModel) -> None:
    """Freeze what is not named, and say what the gradients of the rest are kept in."""
    chosen = trained_names(config, [name for name, _ in model.named_parameters()])
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(config.precision.gradients or "")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
        if wanted is not None and parameter.requires_grad:
            parameter.grad_dtype = wanted


def trained_names(config: Config, names: list[str]) -> set[str]:
    """Raises UserError for a part of `model.train_only` that names no parameter."""
    if config.model.train_only is None:
        return set(names)
    found: set[str] = set()
    for part in str(config.model.train_only).split(","):
        named = named_parameters(part.strip(), names, config.model.n_layers)
        if not named:
            raise UserError(
                f"model.train_only={part.strip()}: names no parameter; use blocks (last 2, 0-3) or patterns such as "
                f"{names[0]} or blocks.*.mlp.*"
            )
        found |= named
    return found


def named_parameters(part: str, names: list[str], n_layers: int) -> set[str]:
    if re.fullmatch(r"all|\d+(-\d+)?|(every|first|last) \d+", part):
        blocks = {f"blocks.{index}." for index in named_blocks(part, n_layers, "model.train_only")}
        return {name for name in names if name.startswith(tuple(blocks))}
    return set(fnmatch.filter(names, part))


def apply_mlp_chunks(config: Config, model: Transformer) -> None:
    if config.model.mlp_chunks > 1:
        blocks = named_blocks(config.model.mlp_chunk_blocks, len(model.blocks), "")
        chunk_mlps(model, config.model.mlp_chunks, blocks)


def apply_recompute(config: Config, model: Transformer) -> None:
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


def apply_activation_offload(config: Config, model: Transformer) -> None:
    """Wrap the segments whose saved tensors wait on the host; those of the last one never do."""
    chosen = offloaded_blocks(config)
    if not chosen:
        return
    offload = ActivationOffload(model, config.offload.min_tensor_bytes)
    last = len(model.segments) - 1
    for index, segment in enumerate(model.segments):  # all: what stays, too, tells when to fetch
        kept = index == last or not chosen.intersection(segment.blocks)
        model.segments[index] = offload.wrap(segment, keep=kept)


def apply_param_offload(config: Config, model: Transformer) -> None:
    if isinstance(model.elsewhere, ParamOffload):
        model.elsewhere.wrap(model)


def apply_compile(config: Config, model: Transformer) -> None:
    if config.compile == "blocks":
        compile_blocks(model)
    elif config.compile == "model":
        compile_training(model)


TECHNIQUES: tuple[Callable[[Config, Transformer], None], ...] = (
    apply_train_only,
    apply_mlp_chunks,
    apply_recompute,
    apply_activation_offload,
    apply_param_offload,
    apply_compile,
)
"""In the order in which they wrap a model, from the inside out."""


def build_loss(config: Config, terms: Terms) -> LossFunction:
    if config.loss.name == "full":
        return partial(full_loss, terms=terms)
    return partial(chunked_loss, terms=terms, chunk_bytes=config.loss.chunk_mib * MIB)


def build_step(config: Config, model: LanguageModel, device: torch.device) -> TrainStep:
    scaler = GradScaler(
        device.type,
        init_scale=config.precision.loss_scale,
        growth_interval=config.precision.scale_growth_every,
        enabled=config.precision.name == "fp16",
    )
    clips_itself = (
        config.optimizer.in_backward and config.optimizer.in_backward_clip == "per_parameter"
    )
    return TrainStep(
        model=model,
        loss_function=build_loss(config, Terms(config.loss.label_smoothing, config.loss.z_loss)),
        updates=build_updates(config, model, device),
        scaler=scaler,
        device=device,
        compute_dtype=COMPUTE_DTYPES.get(config.precision.name),
        clip=0.0 if clips_itself else config.clip,
    )


def build_schedule(config: Config) -> Schedule:
    schedule = config.schedule
    assert config.steps is not None, "epochs are steps by now"
    return make_schedule(
        schedule.name, config.optimizer.lr, schedule.warmup, config.steps, schedule.min_ratio
    )


def prepare_torch(config: Config) -> None:
    """Seeds and the switches of the process."""
    torch.manual_seed(config.seed)
    torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
