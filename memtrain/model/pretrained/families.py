"""Families of Hugging Face models that our Transformer represents: tables of names, ways to read configs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memtrain.errors import UserError
from memtrain.model.pretrained import configs
from memtrain.model.pretrained.config_values import HFConfig, NotNative
from memtrain.model.transformer import Dimensions, Transformer


@dataclass(frozen=True)
class Rows:
    """`ours` below each other are `theirs` below each other, theirs transposed first if they are `transposed`.

    One of the two sides is one tensor alone.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transposed: bool = False
    heights: tuple[int, ...] = ()
    """Rows of each tensor on the side that has several."""


Table = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Our modules and theirs; `{}` is the layer."""

LAYER = "model.layers.{}."
OUTSIDE: Table = (
    (("embedding",), ("model.embed_tokens",)),
    (("norm",), ("model.norm",)),
    (("head",), ("lm_head",)),
    (("blocks.{}.attention_norm",), (LAYER + "input_layernorm",)),
    (("blocks.{}.mlp_norm",), (LAYER + "post_attention_layernorm",)),
    (("blocks.{}.attention.out",), (LAYER + "self_attn.o_proj",)),
    (("blocks.{}.mlp.down",), (LAYER + "mlp.down_proj",)),
)
LLAMA: Table = (
    *OUTSIDE,
    (("blocks.{}.attention.qkv",), tuple(LAYER + f"self_attn.{x}_proj" for x in "qkv")),
    (("blocks.{}.attention.q_norm",), (LAYER + "self_attn.q_norm",)),
    (("blocks.{}.attention.k_norm",), (LAYER + "self_attn.k_norm",)),
    (("blocks.{}.mlp.gate",), (LAYER + "mlp.gate_proj",)),
    (("blocks.{}.mlp.up",), (LAYER + "mlp.up_proj",)),
)
PHI3: Table = (
    *OUTSIDE,
    (("blocks.{}.attention.qkv",), (LAYER + "self_attn.qkv_proj",)),
    (("blocks.{}.mlp.gate", "blocks.{}.mlp.up"), (LAYER + "mlp.gate_up_proj",)),
)
GPT2: Table = (
    (("embedding",), ("transformer.wte",)),
    (("positions",), ("transformer.wpe",)),
    (("norm",), ("transformer.ln_f",)),
    (("head",), ("lm_head",)),
    (("blocks.{}.attention_norm",), ("transformer.h.{}.ln_1",)),
    (("blocks.{}.attention.qkv",), ("transformer.h.{}.attn.c_attn",)),
    (("blocks.{}.attention.out",), ("transformer.h.{}.attn.c_proj",)),
    (("blocks.{}.mlp_norm",), ("transformer.h.{}.ln_2",)),
    (("blocks.{}.mlp.up",), ("transformer.h.{}.mlp.c_fc",)),
    (("blocks.{}.mlp.down",), ("transformer.h.{}.mlp.c_proj",)),
)


@dataclass(frozen=True)
class Family:
    name: str
    """As `model_type` in their config."""
    architecture: str
    dimensions: Callable[[HFConfig], Dimensions]
    """Raises NotNative for a variant that we do not represent, UserError for a config that makes no sense."""
    table: Table
    transposed: bool = False
    """Whether matrices inside blocks have inputs by outputs."""

    def rows(self, dimensions: Dimensions) -> list[Rows]:
        """Every parameter of ours once, and every tensor of theirs."""
        shapes = shapes_of(dimensions)
        found = []
        for ours, theirs in self.table:
            for index in range(dimensions.n_layers if "{}" in ours[0] else 1):
                for kind in ("weight", "bias"):
                    names = tuple(f"{name.format(index)}.{kind}" for name in ours)
                    if names[0] in shapes:
                        others = tuple(f"{name.format(index)}.{kind}" for name in theirs)
                        found.append(self._rows(names, others, shapes, dimensions))
        return found

    def _rows(
        self,
        ours: tuple[str, ...],
        theirs: tuple[str, ...],
        shapes: Mapping[str, tuple[int, ...]],
        dimensions: Dimensions,
    ) -> Rows:
        transposed = self.transposed and ours[0].startswith("blocks.") and len(shapes[ours[0]]) > 1
        heights: tuple[int, ...] = ()
        if len(theirs) > 1:
            heights = dimensions.heads.rows
        elif len(ours) > 1:
            heights = tuple(shapes[name][0] for name in ours)
        return Rows(ours, theirs, transposed, heights)


def shapes_of(dimensions: Dimensions) -> dict[str, tuple[int, ...]]:
    """Of every parameter, tied ones once."""
    with torch.device("meta"):
        model = Transformer(dimensions)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", configs.gpt2, GPT2, transposed=True),
        Family("llama", "LlamaForCausalLM", configs.llama, LLAMA),
        Family("smollm3", "SmolLM3ForCausalLM", configs.smollm3, LLAMA),
        Family("mistral", "MistralForCausalLM", configs.mistral, LLAMA),
        Family("qwen2", "Qwen2ForCausalLM", configs.qwen2, LLAMA),
        Family("qwen3", "Qwen3ForCausalLM", configs.qwen3, LLAMA),
        Family("phi3", "Phi3ForCausalLM", configs.phi3, PHI3),
    )
}


def find_family(hf_config: HFConfig) -> Family:
    """Raises NotNative where our Transformer does not represent the model, UserError where the config is broken."""
    name = hf_config.get("model_type")
    if not isinstance(name, str):
        raise UserError(
            "config.json: no model_type in it; is it the config of a Hugging Face model?"
        )
    if name not in FAMILIES:
        raise NotNative(f"model_type={name}")
    FAMILIES[name].dimensions(hf_config)
    return FAMILIES[name]
