"""The config.json of each family as Dimensions.

Where a key is absent, transformers' default for that family holds. Each function raises NotNative for a variant that
our Transformer does not represent, UserError for a config that makes no sense.
"""

from typing import Any

from memtrain.model.pretrained.config_values import Config, HFConfig, NotNative, rope_of
from memtrain.model.transformer import Dimensions

GPT2_USUAL = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
GELU = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}

LLAMA_USUAL = {
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "num_local_experts": None,
    "num_experts": None,
    "qk_layernorm": False,
    "clip_qkv": None,
}
"""What must be absent, None or so, since the Transformer has nothing like it."""


def gpt2(hf_config: HFConfig) -> Dimensions:
    c = Config(hf_config)
    for key, usual in GPT2_USUAL.items():
        c.refuse_unless(key, usual)
    dropouts = [c.share(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")]
    if len(set(dropouts)) > 1:
        raise NotNative("embd_pdrop, attn_pdrop and resid_pdrop differ")
    activation = c.text("activation_function", "gelu_new")
    if activation not in GELU:
        raise NotNative(f"activation_function={activation}")
    dim, n_heads = c.count("n_embd", 768), c.count("n_head", 12)
    c.check_divides("n_head", n_heads, "n_embd", dim)
    return Dimensions(
        vocab_size=c.count("vocab_size", 50257),
        dim=dim,
        n_layers=c.count("n_layer", 12),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=c.optional_count("n_inner", None) or 4 * dim,
        max_seq_len=c.count("n_positions", 1024),
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        activation=GELU[activation],
        tied=c.flag("tie_word_embeddings", True),
        dropout=dropouts[0],
    )


def llama_like(
    hf_config: HFConfig, theta: float = 10000.0, eps: float = 1e-6, n_kv_heads: int | None = None
) -> dict[str, Any]:
    """Fields of Dimensions that the families with RMSNorm, SwiGLU and rotary positions have in common."""
    c = Config(hf_config)
    for key, usual in LLAMA_USUAL.items():
        c.refuse_unless(key, usual)
    activation = c.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotNative(f"hidden_act={activation}")
    dim, n_heads = c.count("hidden_size"), c.count("num_attention_heads")
    head_dim = c.optional_count("head_dim", None)
    if head_dim is None:
        c.check_divides("num_attention_heads", n_heads, "hidden_size", dim)
    n_kv_heads = c.optional_count("num_key_value_heads", n_kv_heads) or n_heads
    c.check_divides("num_key_value_heads", n_kv_heads, "num_attention_heads", n_heads)
    c.check_divides("2", 2, "head_dim", head_dim or dim // n_heads)
    max_seq_len = c.count("max_position_embeddings", 2048)
    rope_theta, rope_scaling = rope_of(c, theta, max_seq_len)
    return {
        "vocab_size": c.count("vocab_size"),
        "dim": dim,
        "n_layers": c.count("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "ffn_dim": c.count("intermediate_size"),
        "max_seq_len": max_seq_len,
        "norm": "rmsnorm",
        "norm_eps": c.number("rms_norm_eps", eps),
        "activation": "swiglu",
        "positions": "rope",
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tied": c.flag("tie_word_embeddings", False),
        "bias": False,
        "qkv_bias": False,
        "head_dim": None if head_dim == dim / n_heads else head_dim,
    }


def biases(hf_config: HFConfig) -> dict[str, bool]:
    c = Config(hf_config)
    attention = c.flag("attention_bias", False)
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": c.flag("mlp_bias", False)}


def llama(hf_config: HFConfig) -> Dimensions:
    return Dimensions(**llama_like(hf_config) | biases(hf_config))


def smollm3(hf_config: HFConfig) -> Dimensions:
    c = Config(hf_config)
    found = llama_like({"tie_word_embeddings": True} | dict(hf_config), 2e6, n_kv_heads=4)
    interval = c.count("no_rope_layer_interval", 4)
    n_layers = found["n_layers"]
    rotates = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(n_layers)]
    c.check_list("no_rope_layers", rotates, n_layers)
    without = tuple(index for index in range(n_layers) if not rotates[index])
    window = windows(c, n_layers, without)
    return Dimensions(**found | biases(hf_config) | window, no_rope_layers=without)


def mistral(hf_config: HFConfig) -> Dimensions:
    c = Config({"max_position_embeddings": 4096 * 32} | dict(hf_config))
    if "sliding_attention" in (c.get("layer_types") or ()):
        raise NotNative("layer_types of a Mistral")
    window = c.optional_count("sliding_window", 4096)
    return Dimensions(**llama_like(c.values, n_kv_heads=8), window=window)


def qwen2(hf_config: HFConfig) -> Dimensions:
    c = Config({"max_position_embeddings": 32768} | dict(hf_config))
    found = llama_like(c.values, n_kv_heads=32) | {"qkv_bias": True}
    return Dimensions(**found | windows(c, found["n_layers"]))


def qwen3(hf_config: HFConfig) -> Dimensions:
    c = Config({"max_position_embeddings": 32768, "head_dim": 128} | dict(hf_config))
    found = llama_like(c.values, n_kv_heads=32) | biases(hf_config) | {"mlp_bias": False}
    return Dimensions(**found | windows(c, found["n_layers"]), qk_norm=True)


def windows(
    c: Config, n_layers: int, usual_layers: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Which layers see how far, of those families that choose it by layer."""
    window = c.optional_count("sliding_window", 4096)
    kinds = c.get("layer_types")
    if kinds is not None:
        c.check_list("layer_types", kinds, n_layers)
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise NotNative(f"layer_types with {min(map(str, unknown))}")
    if not c.flag("use_sliding_window", False) or window is None:
        if "sliding_attention" in (kinds or ()):
            raise NotNative("layer_types with sliding_attention, use_sliding_window=false")
        return {}
    if kinds is not None:
        layers = tuple(i for i in range(n_layers) if kinds[i] == "sliding_attention")
    elif usual_layers is not None:
        layers = usual_layers
    else:
        layers = tuple(range(c.whole("max_window_layers", 28), n_layers))
    if not layers:
        return {}
    return {"window": window, "window_layers": None if len(layers) == n_layers else layers}


def phi3(hf_config: HFConfig) -> Dimensions:
    c = Config({"max_position_embeddings": 4096} | dict(hf_config))
    window = c.optional_count("sliding_window", None)
    return Dimensions(**llama_like(c.values, eps=1e-5), window=window)
