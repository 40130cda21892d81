"""A decoder-only Transformer: token ids in, hidden states out. The head belongs to the loss."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memtrain.model.language_model import Dimensions as Dimensions
from memtrain.model.language_model import LanguageModel, Segment
from memtrain.model.layers import (
    Attention,
    Block,
    GeluMLP,
    SwigluMLP,
    document_mask,
    make_norm,
    rotary_table,
)


def make_block(d: Dimensions, index: int = 0) -> Block:
    out_bias, mlp_bias = (d.bias if b is None else b for b in (d.out_bias, d.mlp_bias))
    return Block(
        make_norm(d.norm, d.dim, d.norm_eps, d.bias),
        Attention(
            d.dim, d.heads, d.qkv_bias, out_bias, d.dropout, d.norm_eps if d.qk_norm else None
        ),
        make_norm(d.norm, d.dim, d.norm_eps, d.bias),
        make_mlp(d, mlp_bias),
        d.dropout,
        rotates=index not in d.no_rope_layers,
        windowed=index in d.windowed,
    )


def make_mlp(d: Dimensions, bias: bool) -> nn.Module:
    if d.activation == "swiglu":
        return SwigluMLP(d.dim, d.ffn_dim, bias)
    return GeluMLP(d.dim, d.ffn_dim, bias, exact=d.activation == "gelu_erf")


Fill = Callable[[str, nn.Parameter], None]
"""Gives a parameter, known by its name, its values."""


class Transformer(LanguageModel):
    """Ours. Segments share the rotary table, the mask that keeps documents apart and that of blocks with a window."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        d = self.dimensions = dimensions
        self.embedding = nn.Embedding(d.vocab_size, d.dim)
        self.positions = nn.Embedding(d.max_seq_len, d.dim) if d.positions == "learned" else None
        self.dropout = nn.Dropout(d.dropout) if d.dropout else nn.Identity()
        self.blocks = nn.ModuleList(make_block(d, index) for index in range(d.n_layers))
        self.norm = make_norm(d.norm, d.dim, d.norm_eps, d.bias)
        self.head = nn.Linear(d.dim, d.vocab_size, bias=False)
        self.tie()
        self.segments = [Segment([index], block) for index, block in enumerate(self.blocks)]

    def tie(self) -> None:
        """Make head and embedding one parameter, if they are to be; moving a module can part them."""
        if self.dimensions.tied:
            self.head.weight = self.embedding.weight

    def front_parameters(self) -> list[nn.Parameter]:
        """What is read before the first segment."""
        positions = self.positions.parameters() if self.positions is not None else []
        return [*self.embedding.parameters(), *positions]

    def forward(
        self, tokens: Tensor, starts: Tensor | None = None
    ) -> Tensor:  # (B, T) -> (B, T, C)
        """With `starts` (B, T), where each token's document begins, documents do not see each other."""
        T, d = tokens.shape[1], self.dimensions
        x = self.embedding(tokens)
        shared: list[Tensor | None] = [None]  # what every block is given
        if self.positions is not None:
            learned = self.positions
            x = x + (learned.weight[:T] if starts is None else learned(places(starts)))
        else:
            table = rotary_table(T, d.heads.width, d.rope_theta, tokens.device, d.rope_scaling)
            # (2, T, D) or (2, B, 1, T, D)
            shared = [table if starts is None else table[:, places(starts)].unsqueeze(2)]
        x = self.dropout(x)
        if starts is not None:
            shared.append(document_mask(starts, compute_dtype(x)))
        if d.window is not None and d.window < T:
            shared += [None] * (2 - len(shared))
            seen_from = window_starts(T, d.window, starts, tokens.device)
            shared.append(document_mask(seen_from, compute_dtype(x)))
        for segment in self.segments:
            x = segment(x, *shared)
        return self.norm(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def initialise(self, name: str, parameter: nn.Parameter) -> None:
        """GPT-2's scheme (Radford et al. 2019): normal(0.02), residual outputs divided by sqrt(2 x layers)."""
        if parameter.ndim >= 2:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            scale = math.sqrt(2 * self.dimensions.n_layers) if residual else 1.0
            parameter.normal_(0.0, 0.02 / scale)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


def make_transformer(
    dimensions: Dimensions,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    fill: Fill | None = None,
    place: Callable[[nn.Parameter], None] = lambda parameter: None,
    change: Callable[[Transformer], None] = lambda model: None,
) -> Transformer:
    """Built on meta, where `change` may replace modules; then parameter by parameter goes to where it lives.

    Each is made on `device`, filled by `fill` (as for training from the start, if there is none) and handed to
    `place`. It has `dtype`, or what `change` gave it.
    """
    with torch.device("meta"):
        model = Transformer(dimensions).to(dtype)
        change(model)
    fill = fill or model.initialise
    for name, parameter in list(model.named_parameters()):
        values = torch.empty_like(parameter, device=device)
        made = nn.Parameter(values, requires_grad=parameter.requires_grad)
        with torch.no_grad():
            fill(name, made)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, made)
        place(made)
    model.tie()
    return model


def window_starts(seq_len: int, window: int, starts: Tensor | None, device: torch.device) -> Tensor:
    """The first token that each one sees, (B, T), or (1, T) without documents."""
    first = torch.arange(seq_len, device=device) - (window - 1)
    return first.unsqueeze(0) if starts is None else torch.maximum(starts, first)


def places(starts: Tensor) -> Tensor:
    """(B, T): the place of each token in its document."""
    return torch.arange(starts.shape[1], device=starts.device) - starts


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products with `x` are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def count_parameters(model: nn.Module) -> int:
    """Tied weights count once; a module with packed weights (`n_values`) counts what these stand for."""
    values = {module: getattr(module, "n_values", None) for module in model.modules()}
    packed = {module: n for module, n in values.items() if isinstance(n, int)}
    own = [named for module in packed for named in module.named_parameters(recurse=False)]
    stored = {parameter for name, parameter in own if name != "bias"}
    dense = sum(p.numel() for p in model.parameters() if p not in stored)
    return dense + sum(packed.values())


def step_flops(dimensions: Dimensions, n_parameters: int, seq_len: int) -> int:
    """Model FLOPs per token of forward and backward: 6 N + 12 L T C (Chowdhery et al. 2022, appendix B).

    N leaves out the position table and an untied embedding: they are read, not multiplied.
    """
    d = dimensions
    looked_up = d.max_seq_len * d.dim if d.positions == "learned" else 0
    looked_up += 0 if d.tied else d.vocab_size * d.dim
    seen = seq_len * d.n_layers
    if d.window is not None:
        seen -= max(0, seq_len - d.window) * len(d.windowed)
    return 6 * (n_parameters - looked_up) + 12 * seen * d.heads.rows[0]
