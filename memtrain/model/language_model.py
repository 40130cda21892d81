"""What a model offers so that every memory technique works on it: blocks in segments, weights that may be elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memtrain.model.layers import Heads, RopeScaling

ADAPTER = ".adapter."
"""In the names of parameters that adapters have added."""


@dataclass(frozen=True)
class Dimensions:
    """What a Transformer is; the fields mean what the keys of `model` mean."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    activation: str = "gelu"
    positions: str = "learned"
    rope_theta: float = 10000.0
    tied: bool = True
    bias: bool = True
    qkv_bias: bool = True
    dropout: float = 0.0
    head_dim: int | None = None
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """How many tokens, itself included, a token sees in `window_layers`."""
    window_layers: tuple[int, ...] | None = None
    """None: all."""
    no_rope_layers: tuple[int, ...] = ()
    out_bias: bool | None = None
    """Of the attention's output; None: as `bias`."""
    mlp_bias: bool | None = None

    def __post_init__(self) -> None:
        """JSON has neither tuples nor dataclasses."""
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        object.__setattr__(self, "no_rope_layers", tuple(self.no_rope_layers))
        if self.window_layers is not None:
            object.__setattr__(self, "window_layers", tuple(self.window_layers))

    @property
    def heads(self) -> Heads:
        return Heads(self.n_heads, self.n_kv_heads, self.head_dim or self.dim // self.n_heads)

    @property
    def windowed(self) -> tuple[int, ...]:
        """The layers with a window."""
        if self.window is None:
            return ()
        return tuple(range(self.n_layers)) if self.window_layers is None else self.window_layers


@dataclass
class Segment:
    """One or more consecutive blocks: hidden states (B, T, C) and what all blocks share in, hidden states out."""

    blocks: list[int]
    run: Callable[..., Tensor]

    def __call__(self, x: Tensor, *shared: Any) -> Tensor:
        return self.run(x, *shared)


class WeightHome(Protocol):
    def read(self, weight: nn.Parameter) -> Tensor:
        """Its values, flat, on the host."""

    def write(self, weight: nn.Parameter, start: int, piece: Tensor) -> None:
        """New values from flat index `start` on."""

    def written(self, weight: nn.Parameter) -> None:
        """It is complete."""


class LanguageModel(nn.Module):
    """`forward` takes token ids (B, T) and returns normalised hidden states (B, T, C); `head.weight` (V, C) turns them
    into logits.

    `segments` is what `forward` walks over: the blocks, or whatever a memory technique put in their place. It is a
    plain list, so that parameter names stay those of the blocks. `elsewhere` has the weights while the device does not.
    """

    dimensions: Dimensions
    blocks: nn.ModuleList
    norm: nn.Module
    """What runs between the last segment and the head."""
    head: nn.Linear
    segments: list[Segment]
    elsewhere: WeightHome | None = None
    base: str = ""
    """A fingerprint of the frozen model that adapters sit on: what is saved does not hold it."""

    def front_parameters(self) -> list[nn.Parameter]:
        """What is read before the first segment."""
        raise NotImplementedError

    def segment_parameters(self, segment: Segment) -> list[nn.Parameter]:
        return [p for index in segment.blocks for p in self.blocks[index].parameters()]

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """What a checkpoint holds: all of them, or what is trained where adapters sit on a frozen base."""
        named = dict(self.named_parameters())
        if not any(ADAPTER in name for name in named):
            return named
        return {name: p for name, p in named.items() if p.requires_grad}

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The values of a parameter, on the host if the device does not have them all the time."""
        if self.elsewhere is None:
            return parameter.detach()
        return self.elsewhere.read(parameter).view(parameter.shape)

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, values: Tensor) -> None:
        if self.elsewhere is None:
            parameter.copy_(values)
        else:
            self.elsewhere.write(parameter, 0, values.reshape(-1))
            self.elsewhere.written(parameter)
