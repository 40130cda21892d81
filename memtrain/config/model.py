"""Keys of what is trained: `model` and `adapter`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from memtrain.config.bounds import (
    Few,
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
    Range,
    Some,
)


@dataclass(frozen=True)
class RopeScalingConfig:
    """Rotary frequencies for sequences longer than those of pretraining."""

    kind: Literal["none", "linear", "llama3", "yarn"]
    """none: as they are; linear: all divided by `factor`; llama3 and yarn: the slow ones."""
    factor: Annotated[float, Range(1, 10**6)]
    """How many times longer than in pretraining."""
    original_max_seq_len: NonNegative
    """For llama3 and yarn: the sequences of pretraining."""
    low_freq_factor: PositiveFloat
    """For llama3: turns in `original_max_seq_len` below which all of `factor` applies."""
    high_freq_factor: PositiveFloat
    """For llama3: turns above which none of it applies."""
    beta_slow: PositiveFloat
    """For yarn: as `low_freq_factor`."""
    beta_fast: PositiveFloat
    """For yarn: as `high_freq_factor`."""
    attention_factor: PositiveFloat
    """For yarn: cos and sin are multiplied by it."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer. `model=` presets set these."""

    dim: Positive
    """Width of the residual stream."""
    n_layers: Few
    """Blocks."""
    n_heads: Positive
    """Query heads."""
    n_kv_heads: Positive | None
    """Key/value heads; null: as many as heads. Fewer is grouped-query attention, 1 multi-query."""
    head_dim: Positive | None
    """Width of a head; null: dim / n_heads."""
    qk_norm: bool
    """Each query and key is normalised over its head (RMSNorm)."""
    ffn_dim: Positive | None
    """Hidden width of the MLP; null: 4 x dim."""
    vocab_size: Positive | None
    """Rows of the embedding; null: what the tokenizer has."""
    max_seq_len: Positive
    """The longest sequence; with learned positions also the size of their table."""
    norm: Literal["layernorm", "rmsnorm"]
    """Before attention and MLP, and after the last block."""
    norm_eps: PositiveFloat
    """Added to the variance in a norm."""
    activation: Literal["gelu", "gelu_erf", "swiglu"]
    """gelu: its tanh approximation; gelu_erf: the exact one."""
    positions: Literal["learned", "rope"]
    """learned: a table; rope: rotary positions in every attention."""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig
    window: Positive | None
    """Tokens that a token sees, itself included; null: all before it."""
    window_layers: str | int
    """Blocks with the window, as in `checkpointing.blocks`."""
    no_rope_layers: str | int | None
    """Blocks without rotary positions, as in `checkpointing.blocks`; null: none."""
    tied: bool
    """Embedding and output head are one matrix."""
    bias: bool
    """Biases in linear layers and LayerNorms."""
    qkv_bias: bool | None
    """Bias of the query, key and value projections alone; null: as `bias`."""
    out_bias: bool | None
    """Bias of the attention's output projection alone; null: as `bias`."""
    mlp_bias: bool | None
    """Biases of the MLP alone; null: as `bias`."""
    dropout: Probability
    """On embeddings, attention and the outputs of attention and MLP."""
    mlp_chunks: Positive
    """Pieces of the sequence in which norm and MLP of a block run, each again in backward; 1: whole."""
    mlp_chunk_blocks: str | int
    """Which blocks, as in `checkpointing.blocks`."""
    train_only: str | int | None
    """What is trained, the rest is frozen: blocks as in `checkpointing.blocks`, or patterns of parameter names as in
    `blocks.*.mlp.*`, several with commas; null: everything."""
    path: str | None
    """For `model=hf`: a folder as transformers' save_pretrained leaves it, or a .gguf file. It says what the model is:
    the keys above, but for dropout, mlp_chunks and train_only, are then not used."""
    config: str | None
    """For `model=hf`: a transformers config.json alone, planned without weights."""
    backend: Literal["auto", "native", "transformers"]
    """For `model=hf`: native loads into memtrain's own Transformer, transformers trains its own model; auto: native
    where that represents the model exactly."""


@dataclass(frozen=True)
class AdapterConfig:
    """Small matrices that are trained beside frozen large ones."""

    name: Literal["none", "lora", "qlora"]
    """lora (Hu et al. 2021): the base stays in the type of `precision`, or `base_dtype`. qlora (Dettmers et al. 2023):
    its linear layers in 4 bits (NF4); needs the extra `quantized`."""
    path: str | None
    """Go on with an adapter in peft's format; its own config says rank and targets. null: a new one."""
    rank: Some
    """Columns of the first, rows of the second small matrix."""
    alpha: PositiveFloat
    """What the adapter adds is multiplied by alpha / rank."""
    dropout: Probability
    """On what goes into the adapter."""
    targets: str | list[str]
    """Layers with an adapter: all_linear, attention, or a list of patterns such as `q_proj` or `*.mlp.*`."""
    rslora: bool
    """Multiply by alpha / sqrt(rank) (Kalajdzievski 2023)."""
    dora: bool
    """Train the norm of each row of the weight, too (Liu et al. 2024)."""
    also_train: str | None
    """Patterns of other parameters to train, several with commas, such as `embedding.*`; null: none."""
    base_dtype: Literal["fp32", "bf16"] | None
    """What frozen weights are stored in, for qlora those that are not packed; null: bf16 with precision=bf16 or
    bf16_true, else fp32."""
    double_quantization: bool
    """For qlora: the scales of 64 values are themselves stored in 8 bits."""
