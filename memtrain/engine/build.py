"""Config to objects: the only place where the config tree becomes data, model, optimizer and step."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.amp import GradScaler

from memtrain.config import Config
from memtrain.config.derived import (
    named_blocks,
    resolve_path,
    resolved_n_kv_heads,
    weights_home,
)
from memtrain.config.model import RopeScalingConfig
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
from memtrain.engine.adapt import AdaptedFill, adapt
from memtrain.engine.build_updates import build_updates, file_store
from memtrain.engine.peft_files import load_adapter
from memtrain.engine.pretrained import Published, end_of_text, find_published, tokenizer_folder
from memtrain.engine.schedule import Schedule, make_schedule
from memtrain.engine.step import TrainStep
from memtrain.engine.techniques import TECHNIQUES
from memtrain.errors import UserError
from memtrain.memory.file_homes import FileWeights
from memtrain.memory.param_offload import MemoryWeights, ParamOffload
from memtrain.model.adapters import peft_format
from memtrain.model.language_model import LanguageModel
from memtrain.model.layers import RopeScaling
from memtrain.model.loss import LossFunction, Terms, chunked_loss, full_loss
from memtrain.model.pretrained.families import shapes_of
from memtrain.model.pretrained.wrapped import empty_wrapped, load_wrapped
from memtrain.model.transformer import Dimensions, Transformer, make_transformer
from memtrain.units import MIB

Place = Callable[[nn.Parameter], None]
"""Takes a weight that was just made to where it lives."""

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
    vocabulary = build_vocabulary(config, base)
    if wanted.source == "stdlib":
        return tokenize_text(corpus.stdlib_files(), vocabulary, rows, cache)
    assert wanted.path
    paths = [wanted.path] if isinstance(wanted.path, str) else wanted.path
    if wanted.source == "text":
        return tokenize_text(corpus.text_files(paths, base, ""), vocabulary, rows, cache)
    files = corpus.text_files(paths, base, ".jsonl")
    return tokenize_documents(files, vocabulary, rows, cache, wanted.document_mask)


def build_vocabulary(config: Config, base: Path) -> Vocabulary:
    wanted = config.tokenizer
    if wanted.kind == "model":
        assert config.model.path
        cache_dir = resolve_path(config.data.cache_dir, base)
        folder = tokenizer_folder(Path(config.model.path), cache_dir)
        ends = wanted.end_of_text or end_of_text(folder)
        return Vocabulary("file", 0, folder / "tokenizer.json", ends)
    path = resolve_path(wanted.path, base) if wanted.path else None
    return Vocabulary(wanted.kind, wanted.vocab_size, path, wanted.end_of_text)


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
    if config.tokenizer.kind == "model" and (found := find_published(config)):
        return found.dimensions.vocab_size
    return known_tokenizer(build_vocabulary(config, base)).vocab_size


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
    if found := find_published(config):
        if found.dimensions.vocab_size < vocab_size:
            raise UserError(
                f"{found.path}: the model has {found.dimensions.vocab_size} ids, the data ids up to {vocab_size - 1}; "
                "use the model's own tokenizer (tokenizer=model)"
            )
        if found.family is None:
            check_wrapped(config, found.path)
        elif found.dimensions.positions == "learned":
            check_length(config.seq_len, found.dimensions.max_seq_len)
        return found.dimensions
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
        head_dim=model.head_dim,
        qk_norm=model.qk_norm,
        rope_scaling=rope_scaling(model.rope_scaling),
        window=model.window,
        window_layers=blocks_of(model.window_layers, model.n_layers) if model.window else None,
        no_rope_layers=blocks_of(model.no_rope_layers, model.n_layers),
        out_bias=model.out_bias,
        mlp_bias=model.mlp_bias,
    )


def check_length(seq_len: int, n_positions: int | None) -> None:
    """Raises UserError for a sequence with tokens that have no position."""
    if n_positions is not None and seq_len > n_positions:
        raise UserError(f"seq_len={seq_len}: the model has {n_positions} positions; lower seq_len")


def blocks_of(text: str | int | None, n_layers: int) -> tuple[int, ...]:
    return () if text is None else tuple(named_blocks(text, n_layers, ""))


def rope_scaling(wanted: RopeScalingConfig) -> RopeScaling | None:
    return None if wanted.kind == "none" else RopeScaling(**asdict(wanted))


def weight_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.precision.name == "bf16_true" else torch.float32


def base_dtype(config: Config) -> torch.dtype:
    """What the weights of the model itself are stored in. A frozen base needs no more than it is computed in."""
    if not adapts(config):
        return weight_dtype(config)
    asked = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(config.adapter.base_dtype or "")
    in_bf16 = config.precision.name in ("bf16", "bf16_true")
    return asked or (torch.bfloat16 if in_bf16 else torch.float32)


def build_model(
    config: Config, dimensions: Dimensions, device: torch.device, reads: bool = True
) -> LanguageModel:
    """Weights go where they live as they are made; then `TECHNIQUES` change the model, one after the other.

    `reads` False: nothing is read of a model that others have trained, for planning.
    """
    offload = build_param_offload(config, device)
    place: Place = offload.place if offload else lambda parameter: None
    found = find_published(config)
    if found is None or found.family is not None:
        model: LanguageModel = build_transformer(config, dimensions, device, place, found, reads)
    else:
        change = partial(build_adapters, config, found, device) if adapts(config) else ignore
        make = load_wrapped if reads else empty_wrapped
        wrapped = make(found.path, device, base_dtype(config), place, change)
        check_length(config.seq_len, wrapped.n_positions)
        wrapped.dimensions = dimensions
        model = wrapped
    model.elsewhere = offload
    if reads and adapts(config) and found and found.source:
        model.base = found.source.fingerprint()
    if reads and config.adapter.path:
        adapter = peft_format.read(Path(config.adapter.path))
        load_adapter(adapter, model, found.family if found else None)
    for apply in TECHNIQUES:
        apply(config, model)
    return model


def adapts(config: Config) -> bool:
    return config.adapter.name != "none"


def ignore(model: LanguageModel) -> None:
    """Nothing is changed."""


def build_adapters(
    config: Config, found: Published | None, device: torch.device, model: LanguageModel
) -> None:
    adapt(config, model, found.family if found else None, device)


def check_wrapped(config: Config, path: Path) -> None:
    """Raises UserError for what only our own Transformer does."""
    for key, value, plain in (
        ("model.mlp_chunks", config.model.mlp_chunks, 1),
        ("model.dropout", config.model.dropout, 0.0),
        ("compile", config.compile, "off"),
        ("data.document_mask", str(config.data.document_mask).lower(), "false"),
    ):
        if value != plain:
            raise UserError(
                f"{key}={value}: needs memtrain's own Transformer, and {path} stays transformers' model; drop it"
            )


def build_transformer(
    config: Config,
    dimensions: Dimensions,
    device: torch.device,
    place: Place,
    found: Published | None,
    reads: bool,
) -> Transformer:
    """With the weights of `found`, if they are read, else fresh ones."""
    dtype, fill = base_dtype(config), None
    if reads and found is not None and found.source is not None and found.family is not None:
        rows = found.family.rows(dimensions)
        found.source.check(rows, shapes_of(dimensions))
        fill = found.source.filler(rows)
    if not adapts(config):
        return make_transformer(dimensions, device, dtype, fill, place)

    adapted = AdaptedFill(fill, dtype)

    def change(model: Transformer) -> None:
        build_adapters(config, found, torch.device("meta"), model)
        adapted.model = model

    return make_transformer(dimensions, device, dtype, adapted, place, change)


def build_param_offload(config: Config, device: torch.device) -> ParamOffload | None:
    home = weights_home(config)
    if home == "device":
        return None
    in_files = home == "nvme"
    store = FileWeights(file_store(config), device) if in_files else MemoryWeights(device)
    return ParamOffload(device, store)


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
