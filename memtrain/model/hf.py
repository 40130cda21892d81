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
        self.body = body_of(causal_lm)
        self.head = causal_lm.get_output_embeddings()
        self.n_positions = learned_positions(causal_lm)
        """The longest sequence; None where positions are computed, not looked up."""

    def forward(self, tokens: Tensor, starts: None = None) -> Tensor:
        hidden: Tensor = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def check_length(self, seq_len: int) -> None:
        """Raises UserError for a sequence with tokens that have no position."""
        if self.n_positions is not None and seq_len > self.n_positions:
            raise UserError(
                f"seq_len={seq_len}: model.config has {self.n_positions} positions; lower seq_len"
            )


def body_of(causal_lm: Any) -> nn.Module:
    """What makes hidden states. Raises UserError for a model without such a part, or without a head."""
    parts = (causal_lm.base_model, causal_lm.get_decoder(), getattr(causal_lm, "model", None))
    body = next((part for part in parts if part is not None and part is not causal_lm), None)
    if body is None or causal_lm.get_output_embeddings() is None:
        raise UserError(f"model.config: {type(causal_lm).__name__} has no separate body and head")
    found: nn.Module = body
    return found


def learned_positions(causal_lm: Any) -> int | None:
    """Rows of the table of positions (OPT's has two more), if there is one."""
    text_config = causal_lm.config.get_text_config()
    n_positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(n_positions, int) or n_positions < 1:
        return None
    tokens = causal_lm.get_input_embeddings()
    tables = [m for m in causal_lm.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    has_table = any(0 <= table.num_embeddings - n_positions <= 2 for table in tables)
    return n_positions if has_table else None


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
            causal_lm = AutoModelForCausalLM.from_config(config, **{dtype_argument(config): dtype})
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.config={config_path}: not a causal language model: {reason}"
        ) from error
    if recompute:
        try:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            name = type(causal_lm).__name__
            raise UserError(
                f"checkpoint_every=1: transformers' {name} cannot recompute; use checkpoint_every=0"
            ) from error
    model = HFCausalLM(causal_lm)
    model.train()
    return model.to_empty(device=device)


def dtype_argument(config: Any) -> str:
    """transformers renamed it in 4.56 and has kept the old name as a property that warns."""
    return (
        "dtype"
        if isinstance(getattr(type(config), "torch_dtype", None), property)
        else "torch_dtype"
    )
