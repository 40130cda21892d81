"""Tiny Hugging Face models, made by transformers, with norms and biases that are not ones and zeros."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def sizes_of(family: str) -> dict[str, Any]:
    if family == "gpt2":
        dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        return {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB,
                "bos_token_id": 1, "eos_token_id": 1, **dropouts}  # fmt: skip
    grouped = {"num_key_value_heads": 2} if family == "llama" else {}
    return SIZES | grouped


def make(family: str, folder: Path, **more: Any) -> Path:
    """`family` is native (llama, gpt2) or not (gpt_neox, opt, mixtral)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes_of(family) | more)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@cache
def causal_lm(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
