"""LoRA (Hu et al. 2021), with rsLoRA's scale (Kalajdzievski 2023) and DoRA (Liu et al. 2024), on frozen matrices.

An adapter is a child of the linear layer that it changes, so that the layer keeps its name and its parameters theirs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from memtrain.errors import UserError
from memtrain.model.adapters.nf4 import NF4Linear
from memtrain.model.adapters.product import Frozen, Pair, frozen_product

NORM_ROWS = 1024
"""Rows whose norms are computed at a time, in fp32."""


@dataclass(frozen=True)
class LoraOptions:
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    """Divide alpha by sqrt(rank), not by rank."""
    dora: bool = False
    """Train the norm of each row beside its direction."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraPart(nn.Module):
    """What is trained of rows `start` to `end` of a matrix: scale x B A is added to them."""

    def __init__(
        self, in_features: int, rows: tuple[int, int], options: LoraOptions, device: torch.device
    ) -> None:
        super().__init__()
        self.start, self.end = rows
        self.scale = options.scale

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        self.a = made(options.rank, in_features)
        self.b = made(self.end - self.start, options.rank)
        self.magnitude = made(self.end - self.start) if options.dora else None

    def pair(self) -> Pair:
        return Pair(self.start, self.end, self.a, self.b, self.scale)

    @torch.no_grad()
    def norms(self, weight: Tensor) -> Tensor:
        """Of the rows of W + s B A, from |w|^2 + 2 s b.(A w) + s^2 b.(A A^T b): B A is not formed."""
        squares = []
        with torch.autocast(weight.device.type, enabled=False):
            gram = self.a @ self.a.t()
            rows = torch.split(weight[self.start : self.end], NORM_ROWS)
            for w, b in zip(rows, torch.split(self.b, NORM_ROWS), strict=True):
                w = w.float()
                cross = 2 * self.scale * (w @ self.a.t()) + self.scale**2 * (b @ gram)
                squares.append(torch.linalg.vector_norm(w, dim=1).square() + (cross * b).sum(1))
        tiny = torch.finfo(torch.float32).tiny
        return torch.cat(squares).clamp_min(tiny).sqrt()


class Lora(nn.Module):
    """The parts of one linear layer, each under its name."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def parts(self) -> list[LoraPart]:
        return [part for part in self.children() if isinstance(part, LoraPart)]

    @property
    def dora(self) -> bool:
        return any(part.magnitude is not None for part in self.parts())

    def factors(self, weight: Tensor) -> Tensor:
        """What DoRA multiplies each row of W + s B A with, (O,): magnitude over norm. The norm counts as a constant."""
        found = torch.ones(len(weight), dtype=torch.float32, device=weight.device)
        for part in self.parts():
            if part.magnitude is not None:
                found[part.start : part.end] = part.magnitude / part.norms(weight)
        return found


def attach(
    linear: nn.Module,
    parts: Mapping[str, tuple[int, int]],
    options: LoraOptions,
    device: torch.device,
) -> Lora:
    """Freeze `linear` and adapt the rows that `parts` names. Again on the same layer adds parts.

    On meta nothing is initialised: whoever gives storage calls `initialise`, and `start_magnitudes` once W is there.
    """
    _, in_features = _shape(linear)
    for parameter in linear.parameters(recurse=False):
        parameter.requires_grad_(False)
    adapter = getattr(linear, "adapter", None)
    if adapter is None:
        adapter = linear.adapter = Lora(options.dropout)
        linear.forward = partial(_adapted, linear)
    assert adapter.dropout == options.dropout, "the parts of a layer share its dropped inputs"
    for name, rows in parts.items():
        part = LoraPart(in_features, rows, options, device)
        adapter.add_module(name, part)
        if device.type != "meta":
            initialise("a", part.a)
            initialise("b", part.b)
    if device.type != "meta" and next(linear.parameters(recurse=False)).device.type != "meta":
        start_magnitudes(linear)
    return adapter


@torch.no_grad()
def initialise(name: str, parameter: nn.Parameter) -> None:
    """As peft does: A random, B zero, so that training starts from the base."""
    if name.endswith("a"):
        nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
    else:
        parameter.zero_()


@torch.no_grad()
def start_magnitudes(model: nn.Module) -> None:
    """Every magnitude of DoRA becomes the norm of its row: the product is then that of the base."""
    for linear, adapter in adapted(model):
        if adapter.dora:
            weight = _dense(linear, _own_dtype(linear))
            for part in adapter.parts():
                if part.magnitude is not None:
                    part.magnitude.copy_(part.norms(weight))


def adapted(model: nn.Module) -> Iterable[tuple[nn.Module, Lora]]:
    """Every layer of `model` that has an adapter, and that."""
    for module in model.modules():
        adapter = getattr(module, "adapter", None)
        if isinstance(adapter, Lora):
            yield module, adapter


@torch.no_grad()
def merged(linear: nn.Module) -> Tensor:
    """The weight that needs no adapter, in fp32 and in the layout of the layer's own."""
    adapter = linear.adapter
    assert isinstance(adapter, Lora)
    weight = _dense(linear, torch.float32)
    found = weight.clone()
    for part in adapter.parts():
        found[part.start : part.end].addmm_(part.b, part.a, alpha=part.scale)
    if adapter.dora:
        found *= adapter.factors(weight).unsqueeze(1)
    return found.t().contiguous() if _is_conv1d(linear) else found


def _adapted(linear: nn.Module, x: Tensor) -> Tensor:
    """The forward of a layer with an adapter."""
    adapter = linear.adapter
    assert isinstance(adapter, Lora)
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    frozen = Frozen(_shape(linear)[0], partial(_dense, linear), bias)
    pairs = [part.pair() for part in adapter.parts()]
    dropout = adapter.dropout if adapter.training else 0.0
    if not adapter.dora:
        return frozen_product(x, frozen, pairs, dropout)
    factors = adapter.factors(_dense(linear, _own_dtype(linear)))
    return _directed(x, frozen, pairs, dropout, factors)


def _directed(
    x: Tensor, frozen: Frozen, pairs: Sequence[Pair], dropout: float, factors: Tensor
) -> Tensor:
    """DoRA. Dropout drops what is changed alone: W x + f (W + s B A) x' - W x' for the dropped x'."""
    matrix = Frozen(frozen.out_features, frozen.weight)
    dropped = nn.functional.dropout(x, dropout) if dropout else x
    product = frozen_product(dropped, matrix, pairs)
    y = (product * factors).to(product.dtype)
    if dropout:
        y = y + frozen_product(x - dropped, matrix)
    return y if frozen.bias is None else y + frozen.bias.to(y.dtype)


def _dense(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of any layer that can have an adapter."""
    if isinstance(linear, NF4Linear):
        return linear.dequantized(dtype)
    weight = _weight(linear).detach()
    return (weight.t() if _is_conv1d(linear) else weight).to(dtype)


def _weight(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight


def _own_dtype(linear: nn.Module) -> torch.dtype:
    return torch.float32 if isinstance(linear, NF4Linear) else _weight(linear).dtype


def _shape(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs."""
    if isinstance(linear, nn.Linear | NF4Linear):
        return linear.out_features, linear.in_features
    if _is_conv1d(linear):
        inputs, outputs = _weight(linear).shape
        return outputs, inputs
    raise UserError(f"adapter: {type(linear).__name__} is no linear layer that can have one")


def _is_conv1d(linear: nn.Module) -> bool:
    """transformers' layer of GPT-2, whose weight is (I, O)."""
    return type(linear).__name__ == "Conv1D"


ATTENTION = ("attention", "attn", "self_attn", "self_attention")
"""What the module around the projections of attention is called."""


def targets(names: Sequence[str], wanted: str | Sequence[str]) -> list[str]:
    """The linear layers among `names` (dotted) that `adapter.targets` means: what a pattern is or ends with.

    Raises UserError where nothing is meant, with the last parts of the names that there are.
    """
    if wanted == "all_linear":
        return list(names)
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    if wanted == "attention":
        found = [name for name in names if set(name.split(".")[:-1]) & set(ATTENTION)]
        if found:
            return found
    for pattern in patterns:
        if not any(matching(name, pattern) for name in names):
            last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise UserError(
                f"adapter.targets: {pattern!r} matches no linear layer; there are {', '.join(last)}"
            )
    return [name for name in names if any(matching(name, pattern) for pattern in patterns)]


def matching(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
