"""Any causal language model that transformers knows, from its config alone: for planning, without weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import UserError
from memtrain.model.transformer import Transformer


class HFCausalLM(nn.Module):
    """A transformers model in the shape of ours: token ids (B, T) in, hidden states (B, T, C) out, `head` beside it."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.body = causal_lm.base_model
        self.head = causal_lm.get_output_embeddings()

    def forward(self, tokens: Tensor, starts: None = None) -> Tensor:
        hidden: Tensor = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden


LanguageModel = Transformer | HFCausalLM
"""What a training step takes: hidden states from token ids, and a `head`."""


def make_hf_model(
    config_path: Path, recompute: bool, device: torch.device, dtype: torch.dtype
) -> HFCausalLM:
    """Built on meta, then given storage on `device`. Raises UserError without transformers or for a bad config."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("model=hf: needs transformers; pip install 'memtrain[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(config_path)
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.config={config_path}: not a causal language model: {reason}"
        ) from error
    if recompute:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = HFCausalLM(causal_lm)
    model.train()
    return model.to_empty(device=device)
