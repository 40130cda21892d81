"""The typed tree that the Hydra config becomes, and every rule between its fields. No torch, no omegaconf.

`parse` turns a plain dict into a `Config` or raises `UserError`: one line with key and remedy. What is refused here is
refused before anything is allocated.
"""

import difflib
import math
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memtrain.cards import CONF_DIR, Card, load_yaml
from memtrain.errors import UserError


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both inclusive unless `above` is set."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def allows(self, value: float) -> bool:
        return (
            is_finite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        words = [
            f"at least {self.low}" if self.low is not None else "",
            f"above {self.above}" if self.above is not None else "",
            f"at most {self.high}" if self.high is not None else "",
        ]
        return " and ".join(word for word in words if word)

    def refusal_of(self, value: float) -> str:
        """What a value has to be, and what it is where the bounds do not show it."""
        if is_finite(value):
            return f"must be {self}"
        return f"must be {self}, not {'nan' if math.isnan(value) else 'infinite'}"


def is_finite(value: float) -> bool:
    """Of an int of any length, too, of which no float can be made."""
    return isinstance(value, int) or math.isfinite(value)


FP32_HIGH = 1e38
"""A little below the largest fp32: what is computed with these becomes infinite above it."""
MOST = 10**9
Positive = Annotated[int, Range(low=1, high=MOST)]
NonNegative = Annotated[int, Range(low=0, high=10**18)]  # torch and numpy count in 64 bits
Few = Annotated[int, Range(low=1, high=10**4)]
Some = Annotated[int, Range(low=1, high=10**6)]
"""Of what is made one by one, so that a slip of the finger is refused and not waited for."""
PositiveFloat = Annotated[float, Range(above=0, high=FP32_HIGH)]
NonNegativeFloat = Annotated[float, Range(low=0, high=FP32_HIGH)]
Rate = Annotated[float, Range(low=0.001, high=10**9)]
"""Of what is divided by: a step takes no time without end."""
Share = Annotated[float, Range(low=0, high=1)]
Probability = Annotated[float, Range(low=0, high=0.999)]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer. `model=` presets set these."""

    dim: Positive
    """Width of the residual stream."""
    n_layers: Few
    n_heads: Positive
    n_kv_heads: Positive | None
    """Key/value heads; null: as many as heads. Fewer is grouped-query attention, 1 multi-query."""
    ffn_dim: Positive | None
    """Hidden width of the MLP; null: 4 x dim."""
    vocab_size: Positive | None
    """Rows of the embedding; null: what the tokenizer has."""
    max_seq_len: Positive
    """The longest sequence; with learned positions also the size of their table."""
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: PositiveFloat
    activation: Literal["gelu", "swiglu"]
    positions: Literal["learned", "rope"]
    rope_theta: PositiveFloat
    tied: bool
    """Embedding and output head are one matrix."""
    bias: bool
    """Biases in linear layers and LayerNorms."""
    qkv_bias: bool | None
    """Bias of the query, key and value projections alone; null: as `bias`."""
    dropout: Probability
    mlp_chunks: Positive
    """Pieces of the sequence in which norm and MLP of a block run, each again in backward; 1: whole."""
    mlp_chunk_blocks: str | int
    """Which blocks, as in `checkpointing.blocks`."""
    train_only: str | int | None
    """What is trained, the rest is frozen: blocks as in `checkpointing.blocks`, or patterns of parameter names as in
    `blocks.*.mlp.*`, several with commas; null: everything."""
    config: str | None
    """For `model=hf`: a transformers config.json, planned without weights; the keys above are then not used."""


@dataclass(frozen=True)
class DataConfig:
    source: Literal["stdlib", "text", "jsonl", "tokens", "random"]
    path: str | list[str] | None
    """Files, folders or globs for `text` and `jsonl`; the token file for `tokens`. Relative to where the command was
    typed."""
    val_fraction: Annotated[float, Range(low=0, high=0.5)]
    """Share of the files held out for validation; with one file, the share of its tokens at the end. For `jsonl`: share
    of the documents."""
    shuffle: bool
    document_mask: bool
    """For `jsonl`: a token sees its own document alone, and positions count from its beginning."""
    prefetch: NonNegative
    """Windows read ahead by a thread; 0 reads in line."""
    cache_dir: str
    """Where token files and trained tokenizers are kept."""
    vocab_size: Positive
    """For `random` alone: ids are uniform below this."""


@dataclass(frozen=True)
class TokenizerConfig:
    kind: Literal["bytes", "bpe", "file"]
    vocab_size: Annotated[int, Range(low=257, high=10**9)]
    """For `bpe`: size of the vocabulary trained on the corpus."""
    path: str | None
    """For `file`: any tokenizer.json."""
    end_of_text: str | None
    """For `file`: the token that ends a document; null: one of the usual names."""


Precision = Literal["fp32", "bf16", "fp16", "bf16_true", "fp8"]


@dataclass(frozen=True)
class PrecisionConfig:
    name: Precision
    tf32: bool
    """Matrix products of fp32 tensors in TF32 on CUDA cards that have it."""
    master_weights: bool
    """For bf16_true: an fp32 copy of the weights is what the optimizer updates. false: weights and moments are bf16
    alone, rounded up or down at random so that small steps count in the mean."""
    gradients: Literal["fp32", "bf16"] | None
    """What gradients are kept and added up in; null: what the weights are stored in."""
    loss_scale: PositiveFloat
    """For fp16: the first loss scale."""
    scale_growth_every: Positive
    """For fp16: good steps in a row after which the loss scale doubles."""


BlockPolicy = Literal["keep", "selective", "offload", "recompute"]


@dataclass(frozen=True)
class CheckpointingConfig:
    policy: Literal["segments", "alternate", "sqrt", "selective", "per_block", "budget"]
    """How `checkpoint_every` is read: segments of N blocks; alternate: block i is recomputed unless i % N == 0;
    sqrt: segments of about sqrt(layers) blocks, `checkpoint_every` is then set by it. selective: segments of one block
    that keep what `keep` names. per_block: what `per_block` says. budget: chosen per block so that the run fits."""
    blocks: str | int
    """Blocks that may be recomputed: all, 3, 0-3, every 2, first 4, last 4, or several of these with commas."""
    keep: list[Literal["matmul", "attention"]]
    """For `selective`: operators whose outputs are kept."""
    matmul_fraction: Share
    """For `selective`: share of the matrix products that is kept; 0.5 keeps every second one."""
    per_block: list[BlockPolicy]
    """For `per_block`: one of keep, selective, offload, recompute for every block."""
    budget_gib: PositiveFloat | Literal["fit"]
    """For `budget`: GiB that the run may reserve on the device; fit: what the card has."""


OffloadMode = Literal[
    "none",
    "activations",
    "optimizer",
    "optimizer_nvme",
    "params",
    "params_nvme",
    "all",
    "all_nvme",
]
Home = Literal["device", "host", "nvme"]


@dataclass(frozen=True)
class OffloadConfig:
    mode: OffloadMode
    """What lives in host memory instead of on the device. optimizer: master weights and moments; params: weights and
    gradients, too; all: with activations. _nvme: masters and moments, for all_nvme weights and gradients too, lie in
    files under `nvme_dir`."""
    gradients: bool
    """For `optimizer` and `optimizer_nvme`: gradients leave after every micro-batch and add up on the host."""
    optimizer_fraction: Annotated[float, Range(above=0, high=1)]
    """For `optimizer` and `optimizer_nvme`: share of the parameters whose optimizer is on the host."""
    nvme_dir: str | None
    """For the _nvme modes: an existing folder; the run makes one of its own in it and removes it at the end."""
    nvme_buffer_mib: Annotated[int, Range(low=16, high=10**9)]
    """For the _nvme modes: host memory for what is read ahead and written behind, in MiB."""
    min_tensor_bytes: NonNegative
    """For `activations`: smaller saved tensors stay on the device."""
    activations_fraction: Share
    """For `activations`: share of the blocks whose activations leave, evenly spread; the last block's never do."""
    blocks: str | int
    """For `activations`: which blocks, as in `checkpointing.blocks`."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "lion", "muon", "adafactor", "sgd"]
    """muon: hidden matrices alone, AdamW for embedding, head and vectors. 8 bit: needs the extra `quantized`."""
    implementation: Literal["fused", "foreach", "for_loop"]
    """For adamw and sgd. foreach holds one more copy of the weights in a step; for_loop is slow."""
    lr: PositiveFloat
    """For muon, too, one for all: its updates are scaled to the size of AdamW's."""
    betas: list[Share]
    eps: PositiveFloat
    momentum: Share
    """For sgd and muon."""
    weight_decay: NonNegativeFloat
    """On matrices only: never on norms, biases or anything with one dimension."""
    in_backward: bool
    """Each parameter steps as soon as its gradient is whole, which is then freed. Needs accum=1."""
    in_backward_clip: Literal["two_pass", "per_parameter"]
    """two_pass: gradients are made twice, first for their norm: exact, costs a second forward and backward.
    per_parameter: made once, each clipped to `clip` by its own norm; what is not finite skips its own parameter."""
    max_skipped: Positive
    """Steps in a row that are not finite before the run stops."""


@dataclass(frozen=True)
class ScheduleConfig:
    name: Literal["cosine", "linear", "constant"]
    warmup: NonNegative
    """Steps (windows) over which the learning rate rises to `optimizer.lr`."""
    min_ratio: Share
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class LossConfig:
    name: Literal["chunked", "full"]
    """full: all logits of a micro-batch at once; chunked: those of a chunk of tokens at a time."""
    chunk_mib: Positive
    """For `chunked`: what the logits of a chunk may take, in MiB."""
    label_smoothing: Share
    z_loss: NonNegativeFloat
    """Weight of the squared log-denominator of the softmax; validation leaves both out."""


@dataclass(frozen=True)
class AdapterConfig:
    name: Literal["none"]


@dataclass(frozen=True)
class GpuConfig(Card):
    """A Card whose numbers have ranges: what is divided by is never 0, and 0 TFLOPS means the card cannot."""

    memory_mib: Positive
    bandwidth_gb_s: Rate
    fp32_tflops: Rate
    tf32_tflops: NonNegativeFloat
    fp16_tflops: NonNegativeFloat
    bf16_tflops: NonNegativeFloat
    fp8_tflops: NonNegativeFloat
    link_gb_s: Rate
    host_bandwidth_gb_s: Rate
    compute_capability: Annotated[float, Range(low=1, high=99)]
    context_mib: NonNegative
    workspace_mib: Annotated[float, Range(low=0, high=10**6)]
    efficiency: Annotated[float, Range(low=0.001, high=1)]
    auto: bool
    """Take the card in the machine if there is one; the values given here otherwise."""


@dataclass(frozen=True)
class GenerateConfig:
    """For `task=generate`, and for the sample at the end of training."""

    run: str | None
    """A finished run's folder; null: the newest one with this `name`."""
    prompt: str
    tokens: NonNegative
    """New tokens; 0: no sample at the end of training."""
    temperature: NonNegativeFloat
    """0 takes the likeliest token."""
    top_k: NonNegative
    """Draw among the k likeliest; 0: among all."""


@dataclass(frozen=True)
class NumericsConfig:
    """For `task=numerics`."""

    steps: NonNegative
    """Training steps before the gradients are looked at."""


@dataclass(frozen=True)
class SweepConfig:
    metric: Literal[
        "val_loss", "final_loss", "tokens_per_second", "peak_allocated_bytes", "host_peak_rss_bytes"
    ]
    """The number of summary.json that a job returns to a sweeper."""
    resume: bool
    """With -m: go on with the newest sweep of this `name` and these overrides. What is done is kept, what has
    a checkpoint goes on from it, the rest is run again."""


@dataclass(frozen=True)
class Config:
    task: Literal["train", "plan", "generate", "numerics"]
    name: str
    """Names the folder of the run: <outputs>/runs/<name>/..."""
    outputs: str
    """The folder of all runs and sweeps. Relative to where the command was typed."""
    seed: Annotated[int, Range(low=0, high=2**63 - 1)]
    device: Literal["auto", "cpu", "cuda"]
    epochs: Annotated[float, Range(above=0, high=10**6)] | None
    """Passes over the training data, or a part of one, in the place of `steps`: a plan does without the data."""
    steps: Positive | None
    """Optimizer steps; each consumes one window of `accum` micro-batches. null: `epochs` says how many."""
    micro_batch: Some
    """Sequences per forward and backward."""
    seq_len: Positive
    """Tokens per sequence."""
    accum: Some
    """Micro-batches whose gradients one optimizer step uses."""
    checkpoint_every: NonNegative
    """Blocks per recomputed segment; 0: nothing is recomputed."""
    clip: NonNegativeFloat
    """Largest gradient norm; 0: no clipping."""
    log_every: Positive
    eval_every: NonNegative
    """Steps between validations; 0: at the end only."""
    eval_sequences: Positive
    """Held-out sequences per validation, however they fall into micro-batches."""
    save_every: NonNegative
    """Steps between checkpoints, and one at the end; 0: only when a signal stops the run."""
    keep: Annotated[int, Range(low=-1, high=10**9)]
    """Checkpoints that stay beside the one with the least validation loss: the last so many whose step was finite, and
    the newest; -1: all."""
    resume: str | None
    """Go on with a run: latest (of this `name`), a run's folder or a checkpoint's; null: start a new one."""
    compile: Literal["off", "blocks", "model"]
    """What torch.compile makes kernels for: each block, or all from token ids to hidden states; never the loss."""
    plan: Literal["on", "off"]
    """Predict the peak memory of a training run before it starts."""
    deterministic: bool
    """Only deterministic kernels; an operation without one is an error."""
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    precision: PrecisionConfig
    checkpointing: CheckpointingConfig
    offload: OffloadConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    adapter: AdapterConfig
    gpu: GpuConfig
    generate: GenerateConfig
    numerics: NumericsConfig
    sweep: SweepConfig


def similar_keys(wrong: str) -> list[str]:
    """Full names of the keys, or the group, that `wrong` may mean."""
    keys = [*all_keys(), *groups()]
    same_name = [key for key in keys if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return same_name or difflib.get_close_matches(wrong, keys, n=1, cutoff=0.7)


def groups() -> list[str]:
    """What `group=choice` may begin with."""
    return sorted(
        path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "hydra"
    )


def all_keys(cls: type[Any] | None = None, path: str = "") -> Iterator[str]:
    """Of the whole tree, as in `optimizer.lr`, those of `Config` itself first."""
    for name, hint in get_type_hints(cls or Config).items():
        if is_dataclass(hint):
            yield from all_keys(hint, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{path}{name}"


# --- from a plain dict to the tree --------------------------------------------------------------------------------


def parse(tree: dict[str, Any]) -> Config:
    """The checked config of a composed Hydra tree. Raises UserError with the key and the remedy."""
    config: Config = _build(Config, tree, "")
    for rule in RULES:
        rule(config)
    return config


def _build(cls: type[Any], tree: Any, path: str) -> Any:
    if not isinstance(tree, dict):
        raise UserError(f"{path.rstrip('.')}: expected a group of keys, got {tree!r}")
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls)]
    for key in tree:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {path}{close[0]}?" if close else f"known: {', '.join(names)}"
            raise UserError(f"{path}{key}: unknown key; {hint}")
    for name in names:
        if name not in tree:
            raise UserError(f"{path}{name}: missing; set it on the command line or in the config")
    return cls(**{name: _convert(hints[name], tree[name], f"{path}{name}") for name in names})


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the annotated type, without guessing: "off" is not False, True is not 1."""
    if is_dataclass(hint):
        return _build(hint, value, f"{key}.")  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        number = _convert_plain(arguments[0], value, key)
        if not arguments[1].allows(number):
            shown = value if is_finite(number) else number  # an int may have a hundred digits
            raise UserError(f"{key}={shown}: {arguments[1].refusal_of(number)}")
        return number
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        shown = (
            {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        )
        raise UserError(f"{key}={shown}: choose one of {', '.join(arguments)}")
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, key)
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{key}={value}: must be a list, as in {key}=[...]")
        return [_convert(arguments[0], item, key) for item in value]
    plain = _convert_plain(hint, value, key)
    if hint is float and not is_finite(plain):
        raise UserError(f"{key}={plain}: must be a finite number")
    return plain


def _convert_union(choices: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in choices:
        return None
    real = [choice for choice in choices if choice is not type(None)]
    fitting = [choice for choice in real if _may_be(choice, value)]
    return _convert((fitting or real)[0], value, key)


def _may_be(hint: Any, value: Any) -> bool:
    """Whether `value` looks like what `hint` wants, to pick one of several."""
    origin = get_origin(hint)
    if origin is Annotated:
        hint, origin = get_args(hint)[0], None
    if origin is Literal:
        return isinstance(value, str)
    if origin is list:
        return isinstance(value, list)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number if hint is float else isinstance(value, hint) and not isinstance(value, bool)


def _convert_plain(kind: type, value: Any, key: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: f"text (quote it: {key}='\"{value}\"')",
    }[kind]
    raise UserError(f"{key}={value}: must be {wanted}")


# --- rules between fields -----------------------------------------------------------------------------------------


def resolved_n_kv_heads(model: ModelConfig) -> int:
    return model.n_kv_heads or model.n_heads


def named_blocks(text: str | int, n_layers: int, key: str) -> list[int]:
    """The block numbers that `all`, `3`, `0-3`, `every 2`, `first 4`, `last 4` or a list of these with commas means."""
    found: set[int] = set()
    for part in str(text).split(","):
        found.update(_block_range(part.strip(), n_layers, key))
    return sorted(found)


def _block_range(part: str, n_layers: int, key: str) -> range:
    if part == "all":
        return range(n_layers)
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part):
        low, high = int(match[1]), int(match[2] or match[1])
        if low <= high < n_layers:
            return range(low, high + 1)
        raise UserError(f"{key}={part}: the model has blocks 0 to {n_layers - 1}")
    if match := re.fullmatch(r"(every|first|last) (\d+)", part):
        count = int(match[2])
        if count:
            ranges = {"every": range(0, n_layers, count), "first": range(min(count, n_layers))}
            return ranges.get(match[1], range(max(0, n_layers - count), n_layers))
    raise UserError(
        f"{key}={part}: use all, 3, 0-3, every 2, first 4 or last 4, several with commas"
    )


def optimizer_home(config: Config) -> Home:
    """Where master weights and moments are."""
    mode = config.offload.mode
    if mode in ("none", "activations"):
        return "device"
    return "nvme" if mode.endswith("_nvme") else "host"


def weights_home(config: Config) -> Home:
    """Where the weights are between their uses; gradients add up there, too, unless it is the device."""
    if config.offload.mode == "all_nvme":
        return "nvme"
    return "host" if config.offload.mode in ("params", "params_nvme", "all") else "device"


def offloads_activations(config: Config) -> bool:
    """Whether `offload` moves activations (`checkpointing` may do so by itself)."""
    return config.offload.mode in ("activations", "all", "all_nvme")


def blocks_with(config: Config, policy: BlockPolicy) -> set[int]:
    """Those that `checkpointing=per_block` gives this policy."""
    wanted = config.checkpointing
    given = wanted.per_block if wanted.policy == "per_block" else []
    return {index for index, own in enumerate(given) if own == policy}


def offloaded_blocks(config: Config) -> set[int] | None:
    """Blocks whose activations are to leave; None where nothing asks for that, or the budget is to choose."""
    if chosen := blocks_with(config, "offload"):
        return chosen
    if not offloads_activations(config):
        return None
    named = named_blocks(config.offload.blocks, config.model.n_layers, "offload.blocks")
    share = config.offload.activations_fraction
    return {block for k, block in enumerate(named) if int((k + 1) * share) > int(k * share)}


def last_segment(config: Config) -> set[int]:
    """Its blocks: backward uses at once what they keep."""
    last = config.model.n_layers - 1
    wanted, every = config.checkpointing, segment_blocks(config)
    if wanted.policy not in ("segments", "sqrt") or not every:
        return {last}
    chosen = set(named_blocks(wanted.blocks, config.model.n_layers, "checkpointing.blocks"))
    first = last
    while first - 1 in chosen and last in chosen:
        first -= 1  # of the run of chosen blocks that ends with the last one, cut after `every`
    return set(range(last - (last - first) % every, last + 1))


def segment_blocks(config: Config) -> int:
    """Blocks per recomputed segment, `sqrt` resolved; 0: nothing is recomputed."""
    if config.checkpointing.policy == "sqrt":
        return max(1, round(math.sqrt(config.model.n_layers)))
    return config.checkpoint_every


def _card_has_room(config: Config) -> None:
    if config.gpu.context_mib >= config.gpu.memory_mib:
        raise UserError(
            f"gpu.context_mib={config.gpu.context_mib}: leaves nothing of gpu.memory_mib="
            f"{config.gpu.memory_mib}; lower it, or choose a card of conf/gpu"
        )


def _heads_divide_width(config: Config) -> None:
    model = config.model
    if model.config is not None:
        return
    if model.dim % model.n_heads:
        raise UserError(
            f"model.dim={model.dim}: not divisible by model.n_heads={model.n_heads}; change one of them"
        )
    if model.n_heads % resolved_n_kv_heads(model):
        raise UserError(
            f"model.n_kv_heads={model.n_kv_heads}: does not divide model.n_heads={model.n_heads}"
        )
    if model.positions == "rope" and (model.dim // model.n_heads) % 2:
        raise UserError(
            f"model.positions=rope: needs an even head width, got model.dim={model.dim} / "
            f"model.n_heads={model.n_heads} = {model.dim // model.n_heads}"
        )


def _sequence_fits_positions(config: Config) -> None:
    if config.model.config is None and config.seq_len > config.model.max_seq_len:
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
            raise UserError("steps=null: how long? give steps or epochs a number")
        return
    key = f"epochs={config.epochs:g}"
    if config.steps is not None:
        raise UserError(f"{key}: steps={config.steps} says how long, too; set one of them to null")
    if config.data.source == "random":
        raise UserError(f"{key}: data=random has no end; use steps")


def with_steps(config: Config, windows_per_epoch: int) -> Config:
    """`epochs` become the steps that they are. Raises UserError for more of them than `steps` may be."""
    if config.epochs is None:
        return config
    steps = math.ceil(round(windows_per_epoch * config.epochs, 6))  # 10 x 0.7 is a little over 7
    if steps > MOST:
        raise UserError(f"epochs={config.epochs:g}: {steps} steps, at most {MOST} are possible")
    return replace(config, steps=max(1, steps), epochs=None)


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
    if config.model.config is not None:
        return
    n_layers = config.model.n_layers
    for key, text in (
        ("checkpointing.blocks", config.checkpointing.blocks),
        ("offload.blocks", config.offload.blocks),
        ("model.mlp_chunk_blocks", config.model.mlp_chunk_blocks),
    ):
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


def selective_blocks(config: Config) -> set[int]:
    """Blocks that are, or with a budget may be, recomputed selectively."""
    wanted, n_layers = config.checkpointing, config.model.n_layers
    if wanted.policy == "selective":
        return set(named_blocks(wanted.blocks, n_layers, "checkpointing.blocks"))
    return set(range(n_layers)) if wanted.policy == "budget" else blocks_with(config, "selective")


def _hf_is_planned(config: Config) -> None:
    if config.model.config is None:
        return
    if not config.model.config:
        raise UserError("model.config: model=hf needs it, as in model.config=path/config.json")
    if config.task != "plan":
        raise UserError(
            f"model=hf: can be planned, not run; use task=plan instead of task={config.task}"
        )
    if segment_blocks(config) > 1 or config.checkpointing.policy != "segments":
        raise UserError("model=hf: recomputes every block or none; use checkpoint_every=1 or 0")
    for key, value, plain in (
        ("offload", config.offload.mode, config.offload.mode != "activations"),
        ("model.mlp_chunks", config.model.mlp_chunks, config.model.mlp_chunks == 1),
        ("model.train_only", config.model.train_only, config.model.train_only is None),
        ("precision.gradients", config.precision.gradients, config.precision.gradients is None),
        ("checkpointing.blocks", config.checkpointing.blocks, config.checkpointing.blocks == "all"),
    ):
        if not plain:
            raise UserError(f"{key}={value}: cannot be planned with model=hf; drop it")


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
    if config.model.config is not None:
        raise UserError(
            "data.document_mask=true: model=hf is planned without; use data.document_mask=false"
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
        raise UserError("keep=0: would keep no checkpoint; use 1 or more, or -1 for all")
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
    if config.model.config and weights_home(config) != "device":
        raise UserError(f"{key}: model=hf keeps its weights on the device; use offload=optimizer")
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
            f"{key}: offload={config.offload.mode} already lets gradients go in backward; drop one of the two"
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
    _hf_is_planned,
    _mlp_chunks_are_pieces,
    _compiles_with,
    _blocks_are_named,
    _policies_do_not_collide,
    _checkpoints_can_be_kept,
    _offload_is_complete,
    _masters_are_optional_here,
    _steps_in_backward,
)


# Key, what it is for, whether this config has that. A key set to something else than its default warns without it.
EFFECTS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("precision.tf32", "precision=fp32", lambda c: c.precision.name == "fp32"),
    (
        "precision.loss_scale",
        "precision=fp16",
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
        "an optimizer with two of them",
        lambda c: c.optimizer.name not in ("sgd", "adafactor"),
    ),
    (
        "optimizer.eps",
        "optimizer=adamw, adamw_8bit or muon",
        lambda c: c.optimizer.name in ("adamw", "adamw_8bit", "paged_adamw_8bit", "muon"),
    ),
    ("schedule.min_ratio", "a schedule that falls", lambda c: c.schedule.name != "constant"),
    ("model.rope_theta", "model.positions=rope", lambda c: c.model.positions == "rope"),
    ("model.mlp_chunk_blocks", "model.mlp_chunks above 1", lambda c: c.model.mlp_chunks > 1),
    ("model.dropout", "task=train or plan", lambda c: c.task in ("train", "plan")),
    ("data.vocab_size", "data=random", lambda c: c.data.source == "random"),
    ("data.shuffle", "a text", lambda c: c.data.source != "random"),
    (
        "tokenizer.vocab_size",
        "tokenizer=bpe on a text",
        lambda c: c.tokenizer.kind == "bpe" and _has_text(c),
    ),
    ("tokenizer.end_of_text", "tokenizer=file", lambda c: c.tokenizer.kind == "file"),
    ("offload.min_tensor_bytes", "offloaded activations", lambda c: _offloads_activations(c)),
    (
        "offload.activations_fraction",
        "offload=activations or all",
        lambda c: offloads_activations(c),
    ),
    ("offload.blocks", "offload=activations or all", lambda c: offloads_activations(c)),
    ("offload.gradients", "offload=optimizer", lambda c: _has_device_weights_alone(c)),
    ("offload.optimizer_fraction", "offload=optimizer", lambda c: _has_device_weights_alone(c)),
    ("offload.nvme_dir", "an _nvme mode of offload", lambda c: optimizer_home(c) == "nvme"),
    ("offload.nvme_buffer_mib", "an _nvme mode of offload", lambda c: optimizer_home(c) == "nvme"),
    (
        "optimizer.in_backward_clip",
        "optimizer.in_backward=true",
        lambda c: c.optimizer.in_backward,
    ),
    ("loss.chunk_mib", "loss=chunked", lambda c: c.loss.name == "chunked"),
    ("checkpointing.keep", "checkpointing=selective", lambda c: _selects(c)),
    (
        "checkpointing.matmul_fraction",
        "checkpointing=selective that keeps matmul",
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
        if group == "model" and config.model.config is not None:
            continue
        value = getattr(getattr(config, group), name)
        if value != defaults[group][name] and not has(config):
            shown = str(value).lower() if isinstance(value, bool) else value
            found.append(f"{key}={shown} has no effect without {needed}")
    if config.model.config is not None:
        found += _unused_by_hf(config.model, defaults["model"])
    if config.checkpointing.policy == "alternate" and config.checkpoint_every <= 1:
        found.append("checkpointing=alternate recomputes nothing with checkpoint_every below 2")
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
    if config.checkpoint_every > config.model.n_layers:
        found.append(
            f"checkpoint_every={config.checkpoint_every} is one segment: the model has {config.model.n_layers} layers"
        )
    found += warmup_warnings(config)
    if config.compile != "off":
        found += _compile_warnings(config)
    return found


def warmup_warnings(config: Config) -> list[str]:
    """Where `steps` are known."""
    warmup, steps = config.schedule.warmup, config.steps
    if steps is None or warmup < steps or config.task != "train":
        return []
    return [f"schedule.warmup={warmup} never ends in steps={steps}: the learning rate only rises"]


def _unused_by_hf(model: ModelConfig, defaults: dict[str, Any]) -> list[str]:
    """transformers' own config says what the model is."""
    changed = [
        f"model.{field.name}={getattr(model, field.name)}"
        for field in fields(model)
        if field.name != "config" and getattr(model, field.name) != defaults[field.name]
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
    if config.task == "generate":
        return [f"compile={config.compile} has no effect with task=generate"]
    if config.task == "plan" or (config.task == "train" and config.plan == "on"):
        bound = "an upper bound but for the gradients of one block"
        if config.compile == "model" and config.accum > 1:
            bound = "too low by the gradients, which exist twice with accum above 1; compile=blocks avoids it"
        return [f"compile={config.compile} is planned as eager: {bound}"]
    return []


def resolve_path(path: str, base: Path) -> Path:
    """A user's path: `~` expanded, relative to where the command was typed."""
    return base / Path(path).expanduser()
