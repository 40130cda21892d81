"""Dimensions as the config.json of the family that they belong to."""

from dataclasses import replace
from typing import Any

from memtrain.errors import UserError
from memtrain.model.layers import RopeScaling
from memtrain.model.pretrained.families import FAMILIES
from memtrain.model.transformer import Dimensions


def hf_config_of(dimensions: Dimensions) -> dict[str, Any]:
    """The config.json of the family that `dimensions` belong to. Raises UserError where there is none."""
    d = dimensions
    if (d.norm, d.positions) == ("layernorm", "learned") and d.activation in ("gelu", "gelu_erf"):
        found = _gpt2_config(d)
    elif (d.norm, d.positions, d.activation) == ("rmsnorm", "rope", "swiglu"):
        found = _llama_config(d)
    else:
        raise UserError(
            f"model.norm={d.norm}, model.positions={d.positions}, model.activation={d.activation}: no Hugging Face "
            "family has these together; the run's own model.safetensors holds the weights"
        )
    if spelled_out(FAMILIES[found["model_type"]].dimensions(found)) != spelled_out(d):
        raise UserError(
            f"model.*: {found['model_type']}, the Hugging Face family nearest to it, has not the same biases, "
            "heads or layers; the run's own model.safetensors holds the weights"
        )
    return found


def _gpt2_config(d: Dimensions) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": d.vocab_size,
        "n_embd": d.dim,
        "n_layer": d.n_layers,
        "n_head": d.n_heads,
        "n_inner": d.ffn_dim,
        "n_positions": d.max_seq_len,
        "layer_norm_epsilon": d.norm_eps,
        "activation_function": "gelu" if d.activation == "gelu_erf" else "gelu_new",
        "tie_word_embeddings": d.tied,
        "embd_pdrop": d.dropout,
        "attn_pdrop": d.dropout,
        "resid_pdrop": d.dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_config(d: Dimensions) -> dict[str, Any]:
    spelled = spelled_out(d)
    found: dict[str, Any] = {
        "model_type": _llama_kind(spelled),
        "vocab_size": d.vocab_size,
        "hidden_size": d.dim,
        "num_hidden_layers": d.n_layers,
        "num_attention_heads": d.n_heads,
        "num_key_value_heads": d.n_kv_heads,
        "head_dim": d.heads.width,
        "intermediate_size": d.ffn_dim,
        "max_position_embeddings": d.max_seq_len,
        "rms_norm_eps": d.norm_eps,
        "hidden_act": "silu",
        "rope_theta": d.rope_theta,
        "rope_scaling": _rope_scaling_config(d.rope_scaling),
        "tie_word_embeddings": d.tied,
        "attention_bias": bool(spelled.out_bias),
        "mlp_bias": bool(spelled.mlp_bias),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if found["model_type"] != "llama":
        found["sliding_window"] = d.window
    if found["model_type"] not in ("llama", "mistral"):
        kinds = ["full_attention", "sliding_attention"]
        found["use_sliding_window"] = d.window is not None
        found["layer_types"] = [kinds[i in d.windowed] for i in range(d.n_layers)]
    if found["model_type"] == "smollm3":
        found["no_rope_layers"] = [int(i not in d.no_rope_layers) for i in range(d.n_layers)]
    return found


def _llama_kind(d: Dimensions) -> str:
    """`d` as `spelled_out` gives it."""
    if d.qk_norm:
        return "qwen3"
    if d.qkv_bias and not d.out_bias and not d.no_rope_layers:
        return "qwen2"
    if d.no_rope_layers or len(d.windowed) not in (0, d.n_layers):
        return "smollm3"
    return "mistral" if d.windowed else "llama"


def _rope_scaling_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        found["low_freq_factor"] = scaling.low_freq_factor
        found["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        found["beta_fast"], found["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        found["attention_factor"] = scaling.attention_factor
    return found


def spelled_out(d: Dimensions) -> Dimensions:
    """Without what is left to defaults: equal ones are equal models. Dropout is no part of a Llama."""
    scaling = d.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        scaling = RopeScaling("linear", scaling.factor)
    with_bias = d.norm == "layernorm"
    return replace(
        d,
        head_dim=d.heads.width,
        bias=d.bias and with_bias,
        out_bias=d.bias if d.out_bias is None else d.out_bias,
        mlp_bias=d.bias if d.mlp_bias is None else d.mlp_bias,
        window=d.window if d.windowed else None,
        window_layers=d.windowed,
        rope_scaling=scaling,
        dropout=d.dropout if with_bias else 0.0,
    )
