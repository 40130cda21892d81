"""The typed tree that the Hydra config becomes: every key, its bounds and its meaning. No torch, no omegaconf."""

from dataclasses import dataclass
from typing import Annotated, Literal

from memtrain.cards import Card
from memtrain.config.bounds import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    Rate,
    Share,
    Some,
)
from memtrain.config.model import AdapterConfig, ModelConfig


@dataclass(frozen=True)
class DataConfig:
    source: Literal["stdlib", "text", "jsonl", "tokens", "random"]
    """stdlib: the source text of Python's standard library; text: files; jsonl: documents; tokens: a token file;
    random: uniform ids."""
    path: str | list[str] | None
    """Files, folders or globs for `text` and `jsonl`; the token file for `tokens`. Relative to where the command was
    typed."""
    val_fraction: Annotated[float, Range(0, 0.5)]
    """Share of the files held out for validation; with one file, the share of its tokens at the end. For `jsonl`: share
    of the documents."""
    shuffle: bool
    """Draw the order of samples anew in every epoch."""
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
    kind: Literal["bytes", "bpe", "file", "model"]
    """bytes: one token a byte; bpe: trained on the corpus; file: `path`; model: that of `model.path`."""
    vocab_size: Annotated[int, Range(257, 10**9)]
    """For `bpe`: size of the vocabulary trained on the corpus."""
    path: str | None
    """For `file`: any tokenizer.json."""
    end_of_text: str | None
    """For `file` and `model`: the token that ends a document; null: what the model says, or one of the usual names."""


Precision = Literal["fp32", "bf16", "fp16", "bf16_true", "fp8"]


@dataclass(frozen=True)
class PrecisionConfig:
    name: Precision
    """What is stored and what is computed in; see docs/fit-my-model.md."""
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
    optimizer_fraction: Annotated[float, Range(0, 1, above=True)]
    """For `optimizer` and `optimizer_nvme`: share of the parameters whose optimizer is on the host."""
    nvme_dir: str | None
    """For the _nvme modes: an existing folder; the run makes one of its own in it and removes it at the end."""
    nvme_buffer_mib: Annotated[int, Range(16, 10**9)]
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
    """Peak learning rate, for muon, too: its updates are scaled to the size of AdamW's."""
    betas: list[Share]
    """Decay of the first and the second moment."""
    eps: PositiveFloat
    """Added to the root of the second moment."""
    momentum: Share
    """Momentum of sgd and muon."""
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
    """How the learning rate falls after the warmup."""
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
    """Share of the target's probability that is spread over the vocabulary."""
    z_loss: NonNegativeFloat
    """Weight of the squared log-denominator of the softmax; validation leaves both out."""


@dataclass(frozen=True)
class ExportConfig:
    """For `task=export`."""

    run: str | None
    """A run's or checkpoint's folder; null: the newest finished run with this `name`."""
    path: str | None
    """The folder to write; null: `hf` in the run's folder."""
    merge: bool
    """Add the adapter to its base and write one model; false: write the adapter alone."""
    dtype: Literal["fp32", "bf16", "fp16"] | None
    """What the weights are written in; null: as stored."""


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
    compute_capability: Annotated[float, Range(1, 99)]
    context_mib: NonNegative
    workspace_mib: Annotated[float, Range(0, 10**6)]
    efficiency: Annotated[float, Range(0.001, 1)]
    auto: bool
    """Take the card in the machine if there is one; the values given here otherwise."""


@dataclass(frozen=True)
class GenerateConfig:
    """For `task=generate`, and for the sample at the end of training."""

    run: str | None
    """A finished run's folder; null: the newest one with this `name`."""
    prompt: str
    """Text to continue."""
    tokens: NonNegative
    """New tokens; 0: no sample at the end of training."""
    temperature: NonNegativeFloat
    """Logits are divided by it before a token is drawn; 0 takes the likeliest."""
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
    task: Literal["train", "plan", "generate", "numerics", "export"]
    """train; plan: what a run needs, without running it; generate: text by a finished run; numerics: what float formats
    lose of the gradients; export: a run as a Hugging Face folder."""
    name: str
    """Names the folder of the run: `<outputs>/runs/<name>/...`"""
    outputs: str
    """The folder of all runs and sweeps. Relative to where the command was typed."""
    seed: Annotated[int, Range(0, 2**63 - 1)]
    """Of all that is random: weights, data order, dropout and samples of text."""
    device: Literal["auto", "cpu", "cuda"]
    """auto: CUDA if there is a GPU, else the CPU."""
    epochs: Annotated[float, Range(0, 10**6, above=True)] | None
    """Passes over the training data, or a part of one, in the place of `steps`: a plan does without the data."""
    steps: Positive | None
    """Optimizer steps; each consumes one window of `accum` micro-batches. null: `epochs` says how many. 300 where
    neither is given."""
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
    """Steps between records on the console, in metrics.jsonl and TensorBoard."""
    eval_every: NonNegative
    """Steps between validations; 0: at the end only."""
    eval_sequences: Positive
    """Held-out sequences per validation, however they fall into micro-batches."""
    save_every: NonNegative
    """Steps between checkpoints, and one at the end; 0: only when a signal stops the run."""
    keep: Annotated[int, Range(-1, 10**9)]
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
    export: ExportConfig
    sweep: SweepConfig
