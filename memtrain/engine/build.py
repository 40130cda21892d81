"""Config to objects: the only place where the config tree becomes data, model, optimizer and step."""

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler

from memtrain.config import Config
from memtrain.config.derived import (
    blocks_with,
    named_blocks,
    offloaded_blocks,
    optimizer_home,
    resolve_path,
    resolved_n_kv_heads,
    segment_blocks,
    weights_home,
)
from memtrain.config.tree import DataConfig, TokenizerConfig
from memtrain.data import corpus, documents, store
from memtrain.data.loader import Batch, Loader, RandomTokens, Windows, count_samples, eval_batches
from memtrain.data.packing import Packed, PackedLoader, pack_split, packed_batches
from memtrain.data.store import Tokens
from memtrain.data.tokenizer import (
    TRAIN_BYTES,
    EncodeError,
    Tokenizer,
    bytes_tokenizer,
    load_tokenizer,
    train_bpe,
)
from memtrain.engine.optimizers import decay_groups, make_optimizer
from memtrain.engine.schedule import Schedule, make_schedule
from memtrain.engine.step import TrainStep
from memtrain.engine.update import PlainUpdate, Update
from memtrain.errors import UserError
from memtrain.memory.activation_offload import ActivationOffload
from memtrain.memory.compiled import compile_blocks, compile_training
from memtrain.memory.file_homes import FileGradients, FileState, FileWeights
from memtrain.memory.file_store import FileStore
from memtrain.memory.host_optimizer import (
    DeviceWeights,
    GradientHome,
    HostOptimizer,
    MakeOptimizer,
    MemoryGradients,
    MemoryState,
    StateHome,
    WeightHome,
    tell_before_reading,
)
from memtrain.memory.mlp_chunks import chunk_mlps
from memtrain.memory.param_offload import MemoryWeights, ParamOffload, WeightStore
from memtrain.memory.per_parameter import PerParameter
from memtrain.memory.recompute import recompute
from memtrain.memory.selective import selective_contexts
from memtrain.memory.stochastic_rounding import round_stochastically
from memtrain.model.hf import HFCausalLM, LanguageModel, make_hf_model
from memtrain.model.layers import gradient_dtype
from memtrain.model.loss import LossFunction, Terms, chunked_loss, full_loss
from memtrain.model.transformer import Dimensions, Transformer, make_transformer
from memtrain.units import MIB

ProgressFor = Callable[[str, int], AbstractContextManager[Callable[[int, int], None]]]
"""Title and bytes of something that takes long -> context that gives a callback(done, total)."""

RANDOM_SAMPLES = 2**20
"""Samples of an epoch of random tokens; there is no text that would say."""

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- data ---------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Token ids of both splits; `train` is None for random tokens, which are made as they are needed."""

    train: Tokens | Packed | None
    val: Tokens | Packed | None
    """None where `data.val_fraction` is 0, or there is but one document."""
    vocab_size: int
    tokenizer: Tokenizer | None
    content: str = ""
    """A hash of the ids of both splits and of what they stand for."""


def build_data(config: Config, base: Path, progress: ProgressFor) -> Data:
    """Tokenize or open what `data` names. Raises UserError for what cannot be read or is too short."""
    if config.data.source == "jsonl":
        data = _build_documents(config, base, progress)
    else:
        data = _open_data(config, base, progress)
    if data.tokenizer and config.generate.tokens:
        prompt_ids(config, data.tokenizer)
    if isinstance(data.train, np.ndarray):
        count_samples(data.train, config.seq_len, training_name(config))
    if config.data.val_fraction == 0:
        data.val = None
    if isinstance(data.val, np.ndarray):
        what = (
            f"the validation text (data.val_fraction={config.data.val_fraction:g}; 0 does without)"
        )
        count_samples(data.val, config.seq_len, what)
    return data


def prompt_ids(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Raises UserError for a prompt that cannot be encoded: before the training that it is to end."""
    try:
        return tokenizer.encode([config.generate.prompt])[0].tolist() or [tokenizer.end_of_text_id]
    except EncodeError as error:
        raise UserError(f"generate.prompt={config.generate.prompt!r}: {error}") from error


def training_name(config: Config) -> str:
    return (
        f"the training text (data.path={config.data.path})"
        if config.data.path
        else "the training text"
    )


def _open_data(config: Config, base: Path, progress: ProgressFor) -> Data:
    if config.data.source == "random":
        n_val = config.eval_sequences * config.seq_len + 1
        generator = np.random.default_rng(config.seed)
        random = generator.integers(config.data.vocab_size, size=n_val, dtype=np.uint32)
        return Data(None, random, config.data.vocab_size, None)
    if config.data.source == "tokens":
        assert isinstance(config.data.path, str)
        file = store.open_tokens(resolve_path(config.data.path, base))
        file.check_ids(config.model.vocab_size or file.vocab_size)
        train, val = store.split_tokens(file.tokens, config.data.val_fraction, config.seq_len + 1)
        return Data(train, val, file.vocab_size, None, content_of(file))
    return _build_text(config, base, progress)


def _build_text(config: Config, base: Path, progress: ProgressFor) -> Data:
    files = _text_files(config.data, base)
    train_files, val_files = corpus.split(files, config.data.val_fraction)
    cache_dir = resolve_path(config.data.cache_dir, base)
    tokenizer = build_tokenizer(config.tokenizer, train_files, cache_dir, base, progress)
    train = _tokenize("tokenizing the text", train_files, tokenizer, cache_dir, progress)
    row_tokens = config.seq_len + 1
    if val_files:
        val = _tokenize("tokenizing the held-out text", val_files, tokenizer, cache_dir, progress)
        if min(train.count, val.count) >= row_tokens or train.count + val.count < 2 * row_tokens:
            content = content_of(train, val)
            return Data(train.tokens, val.tokens, tokenizer.vocab_size, tokenizer, content)
        # Whole files leave one side without a row, though there is text for both.
        train = _tokenize("tokenizing the text", files, tokenizer, cache_dir, progress)
    splits = store.split_tokens(train.tokens, config.data.val_fraction, row_tokens)
    return Data(*splits, tokenizer.vocab_size, tokenizer, content_of(train))


def _build_documents(config: Config, base: Path, progress: ProgressFor) -> Data:
    files = _text_files(config.data, base)
    cache_dir = resolve_path(config.data.cache_dir, base)
    tokenizer = build_tokenizer(
        config.tokenizer, files, cache_dir, base, progress, documents.read_texts
    )
    with progress("tokenizing the documents", corpus.total_bytes(files)) as callback:
        file = documents.tokenize_documents(files, tokenizer, cache_dir, callback)
    wanted = config.data
    train, val = pack_split(file, wanted.val_fraction, config.seq_len, wanted.document_mask)
    if not train.n_targets:
        raise UserError(
            f"{training_name(config)}: {train.n_documents} documents and no token to learn"
        )
    return Data(train, val, tokenizer.vocab_size, tokenizer, content_of(file))


def content_of(*files: store.TokenFile) -> str:
    return " ".join(f"{file.content_hash}/{file.tokenizer_hash}" for file in files)


def is_loadable(path: Path) -> bool:
    """A cached tokenizer that is damaged is trained again."""
    try:
        load_tokenizer(path)
    except UserError:
        return False
    return True


def _tokenize(
    title: str, files: list[Path], tokenizer: Tokenizer, cache_dir: Path, progress: ProgressFor
) -> store.TokenFile:
    with progress(title, corpus.total_bytes(files)) as callback:
        return store.tokenize_files(files, tokenizer, cache_dir, callback)


def _text_files(data: DataConfig, base: Path) -> list[Path]:
    if data.source == "stdlib":
        return corpus.stdlib_files()
    assert data.path
    suffix = ".jsonl" if data.source == "jsonl" else ""
    return corpus.text_files([data.path] if isinstance(data.path, str) else data.path, base, suffix)


def build_tokenizer(
    tokenizer: TokenizerConfig,
    files: list[Path],
    cache_dir: Path,
    base: Path,
    progress: ProgressFor,
    read: Callable[[Path], Iterator[str]] = corpus.read_pieces,
) -> Tokenizer:
    """A trained BPE is kept in the cache under its corpus, how that is read, and size."""
    if tokenizer.kind == "bytes":
        return bytes_tokenizer()
    if tokenizer.kind == "file":
        assert tokenizer.path
        return load_tokenizer(resolve_path(tokenizer.path, base), tokenizer.end_of_text)
    kind = "bpe" if read is corpus.read_pieces else "bpe-jsonl"
    path = cache_dir / f"{kind}-{tokenizer.vocab_size}-{corpus.fingerprint(files)[:16]}.json"
    if not is_loadable(path):
        store.make_folder(cache_dir)
        total = corpus.total_bytes(files)
        with progress("training the tokenizer", total) as callback:
            pieces = corpus.unchanged(files, (piece for file in files for piece in read(file)))
            every = -(-total // TRAIN_BYTES) or 1
            trained = train_bpe(
                islice(pieces, 0, None, every),
                tokenizer.vocab_size,
                lambda done: callback(min(done * every, total), total),
            )
        with store.replacing(path) as output:
            output.write(trained.to_json().encode())
    return load_tokenizer(path)


def expected_vocab_size(config: Config, base: Path) -> int:
    """The data's vocabulary, without reading the text: for planning."""
    if config.data.source == "random":
        return config.data.vocab_size
    if config.data.source == "tokens":
        assert isinstance(config.data.path, str)
        return store.open_tokens(resolve_path(config.data.path, base)).vocab_size
    if config.tokenizer.kind == "bpe":
        return config.tokenizer.vocab_size
    return build_tokenizer(config.tokenizer, [], base, base, lambda *_: nullcontext()).vocab_size  # type: ignore[arg-type]


def build_loader(config: Config, data: Data, device: torch.device) -> Windows:
    shared: dict[str, Any] = {
        "micro_batch": config.micro_batch,
        "accum": config.accum,
        "seed": config.seed,
        "pin": device.type == "cuda",
        "prefetch": config.data.prefetch,
    }
    if data.train is None:
        return RandomTokens(
            data.vocab_size, config.seq_len, samples_per_epoch=RANDOM_SAMPLES, **shared
        )
    shared |= {"shuffle": config.data.shuffle, "content": data.content}
    if isinstance(data.train, Packed):
        return PackedLoader(data.train, **shared)
    return Loader(data.train, config.seq_len, name=training_name(config), **shared)


def validation_batches(config: Config, data: Data) -> Iterator[Batch]:
    assert data.val is not None
    if isinstance(data.val, Packed):
        return packed_batches(data.val, config.micro_batch, config.eval_sequences)
    return eval_batches(data.val, config.seq_len, config.micro_batch, config.eval_sequences)


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
    offload = None
    if weights_home(config) != "device":
        offload = ParamOffload(device, weight_store(config, device))
    place = offload.place if offload else lambda parameter: None
    model = make_transformer(dimensions, device, weight_dtype(config), place)
    train_only(config, model)
    if config.model.mlp_chunks > 1:
        blocks = named_blocks(config.model.mlp_chunk_blocks, dimensions.n_layers, "")
        chunk_mlps(model, config.model.mlp_chunks, blocks)
    recompute_blocks(config, model)
    offload_blocks(config, model)
    if offload:
        offload.wrap(model)
    if config.compile == "blocks":
        compile_blocks(model)
    elif config.compile == "model":
        compile_training(model)
    return model


def weight_store(config: Config, device: torch.device) -> WeightStore:
    if weights_home(config) == "nvme":
        return FileWeights(file_store(config), device)
    return MemoryWeights(device)


def file_store(config: Config) -> FileStore:
    """In the run's own folder: whoever trains claims one and puts it in the place of `offload.nvme_dir`."""
    assert config.offload.nvme_dir
    return FileStore(Path(config.offload.nvme_dir))


def train_only(config: Config, model: LanguageModel) -> None:
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


def offload_blocks(config: Config, model: Transformer) -> None:
    """Wrap the segments whose saved tensors wait on the host; those of the last one never do."""
    chosen = offloaded_blocks(config)
    if not chosen:
        return
    offload = ActivationOffload(model, config.offload.min_tensor_bytes)
    last = len(model.segments) - 1
    for index, segment in enumerate(model.segments):  # all: what stays, too, tells when to fetch
        kept = index == last or not chosen.intersection(segment.blocks)
        model.segments[index] = offload.wrap(segment, keep=kept)


def recompute_blocks(config: Config, model: Transformer) -> None:
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


def build_loss(config: Config, terms: Terms) -> LossFunction:
    if config.loss.name == "full":
        return partial(full_loss, terms=terms)
    return partial(chunked_loss, terms=terms, chunk_bytes=config.loss.chunk_mib * MIB)


def build_updates(config: Config, model: LanguageModel, device: torch.device) -> list[Update]:
    """What steps the parameters that are trained: on the device, on the host, or some here and some there."""
    make, groups = optimizer_factory(config), parameter_groups(config, model)
    if optimizer_home(config) == "device":
        return [build_device_update(config, model, groups, make)]
    on_host = host_parameters(config, model)
    updates: list[Update] = []
    if host_groups := only(groups, lambda p: p in on_host):
        updates.append(build_host_update(config, model, device, host_groups, make))
    if device_groups := only(groups, lambda p: p not in on_host):
        updates.append(build_device_update(config, model, device_groups, make))
    return updates


def optimizer_factory(config: Config) -> MakeOptimizer:
    """The optimizer that is wanted, for whatever groups it is to step."""
    wanted = config.optimizer
    return partial(
        make_optimizer,
        wanted.name,
        lr=wanted.lr,
        betas=(wanted.betas[0], wanted.betas[1]),
        eps=wanted.eps,
        momentum=wanted.momentum,
        implementation=wanted.implementation,
    )


def parameter_groups(config: Config, model: LanguageModel) -> list[dict[str, Any]]:
    groups = decay_groups(model.named_parameters(), config.optimizer.weight_decay)
    return [{**group, "lr": config.optimizer.lr} for group in groups]


def only(
    groups: list[dict[str, Any]], wanted: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    found = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [group for group in found if group["params"]]


def host_parameters(config: Config, model: LanguageModel) -> set[nn.Parameter]:
    """Those whose optimizer is on the host: `offload.optimizer_fraction` of all, evenly spread."""
    on_device = weights_home(config) == "device"
    share, seen, chosen = config.offload.optimizer_fraction if on_device else 1.0, 0, 0
    found = set()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        seen += parameter.numel()
        if chosen + parameter.numel() / 2 <= share * seen:
            chosen += parameter.numel()
            found.add(parameter)
    return found


def build_device_update(
    config: Config, model: LanguageModel, groups: list[dict[str, Any]], make: MakeOptimizer
) -> Update:
    weight = next(p for group in groups for p in group["params"])
    whole = weight.dtype == gradient_dtype(weight) == torch.float32
    if whole and not config.optimizer.in_backward:
        return PlainUpdate(make(groups))
    return PerParameter(
        groups,
        make,
        round_to=None if config.precision.master_weights else round_stochastically,
        in_backward=config.optimizer.in_backward_clip if config.optimizer.in_backward else None,
        clip=config.clip,
    )


def build_host_update(
    config: Config,
    model: LanguageModel,
    device: torch.device,
    groups: list[dict[str, Any]],
    make: MakeOptimizer,
) -> Update:
    parameters = [parameter for group in groups for parameter in group["params"]]
    offload = model.elsewhere if isinstance(model, Transformer) else None
    weights: WeightHome = DeviceWeights(parameters, device)
    if isinstance(offload, ParamOffload):
        offload.resident = DeviceWeights([p for p in model.parameters() if p.ndim < 2], device)
        weights = offload
    states: StateHome = MemoryState(make)
    gradients: GradientHome = MemoryGradients(device)
    if optimizer_home(config) == "nvme":
        states = FileState(file_store(config), make, config.offload.nvme_buffer_mib * MIB)
    if weights_home(config) == "nvme":
        gradients = FileGradients(file_store(config), device)
    update = HostOptimizer(
        groups,
        device=device,
        accumulate=config.offload.gradients or weights_home(config) != "device",
        weights=weights,
        states=states,
        gradients=gradients,
    )
    update.start(model.parameters())
    if isinstance(offload, ParamOffload):
        offload.before_read, offload.is_due = update.ready, update.is_due
    elif isinstance(model, Transformer) and config.compile != "model":
        tell_before_reading(model, update.ready)
    else:
        model.register_forward_pre_hook(lambda *_: update.settle())
    return update


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
