"""Where adapters sit, and how a base with them gets its values."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from memtrain.config import Config
from memtrain.errors import UserError
from memtrain.model.adapters import peft_format
from memtrain.model.adapters.lora import Lora, LoraOptions, LoraPart, attach, initialise, targets
from memtrain.model.adapters.nf4 import NF4Linear
from memtrain.model.adapters.peft_format import PeftAdapter
from memtrain.model.language_model import ADAPTER, LanguageModel
from memtrain.model.pretrained.families import FAMILIES, Family
from memtrain.model.transformer import Fill, Transformer


@dataclass(frozen=True)
class Site:
    """Rows of a linear layer that Hugging Face knows as a layer of its own."""

    module: str
    """Ours: `blocks.0.attention.qkv`."""
    path: str
    """Theirs: `model.layers.0.self_attn.q_proj`."""
    start: int
    stop: int

    @property
    def part(self) -> str:
        return self.path.rpartition(".")[2]


def sites_of(model: LanguageModel, family: Family | None) -> list[Site]:
    """Every linear layer of the blocks. A model of our own is called what its nearest family calls it."""
    if not isinstance(model, Transformer):
        return list(_wrapped_sites(model))
    layernorm = model.dimensions.norm == "layernorm"
    return list(_native_sites(model, family or FAMILIES["gpt2" if layernorm else "llama"]))


def _native_sites(model: Transformer, family: Family) -> Iterator[Site]:
    modules = dict(model.named_modules())
    for index in range(len(model.blocks)):
        for ours, theirs in family.table:
            names = [name.format(index) for name in ours]
            if "{}" not in ours[0] or not isinstance(modules.get(names[0]), nn.Linear | NF4Linear):
                continue
            heights = (
                model.dimensions.heads.rows if len(theirs) > 1 else (rows_of(modules[names[0]]),)
            )
            start = 0
            for their, height in zip(theirs, heights, strict=True):
                yield Site(names[0], their.format(index), start, start + height)
                start += height


def _wrapped_sites(model: LanguageModel) -> Iterator[Site]:
    inside = {id(module) for module in model.blocks.modules()}
    for name, module in model.named_modules():
        if id(module) in inside and is_linear(module):
            yield Site(name, name.removeprefix("lm."), 0, rows_of(module))


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | NF4Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def rows_of(linear: nn.Module) -> int:
    """Outputs of a layer; transformers' Conv1D has inputs by outputs."""
    if isinstance(linear, NF4Linear):
        return linear.out_features
    assert isinstance(linear.weight, Tensor)
    return linear.weight.shape[is_conv1d(linear)]


def chosen_sites(config: Config, sites: list[Site]) -> dict[Site, LoraOptions]:
    """Those that `adapter.path` or `adapter.targets` names. Raises UserError for what matches nothing."""
    if config.adapter.path:
        return sites_with(peft_format.read(Path(config.adapter.path)), sites)
    found = set(targets([site.path for site in sites], config.adapter.targets))
    return {site: adapter_options(config) for site in sites if site.path in found}


def sites_with(adapter: PeftAdapter, sites: list[Site]) -> dict[Site, LoraOptions]:
    """Raises UserError for an adapter on layers that the model does not have."""
    by_path = {site.path: site for site in sites}
    for layer in adapter.ranks:
        if layer not in by_path:
            raise UserError(
                f"{adapter.folder}: sits on {layer}, which the model does not have; is it of another base?"
            )
    return {by_path[layer]: adapter.options_of(layer) for layer in adapter.ranks}


def adapter_options(config: Config) -> LoraOptions:
    wanted = config.adapter
    if wanted.path:
        return peft_format.read(Path(wanted.path)).options
    return LoraOptions(wanted.rank, wanted.alpha, wanted.dropout, wanted.rslora, wanted.dora)


def adapt(
    config: Config, model: LanguageModel, family: Family | None, device: torch.device
) -> None:
    """Quantize the linear layers of the blocks, if that is wanted, and put adapters beside those chosen."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    sites = sites_of(model, family)
    if config.adapter.name == "qlora":
        for name in dict.fromkeys(site.module for site in sites):
            heights = [site.stop - site.start for site in sites if site.module == name]
            replace_by_nf4(model, name, heights, config.adapter.double_quantization)
    for site, options in chosen_sites(config, sites).items():
        parts = {site.part: (site.start, site.stop)}
        attach(model.get_submodule(site.module), parts, options, device)


def replace_by_nf4(model: nn.Module, name: str, heights: list[int], double: bool) -> None:
    """Values, where there are any, are packed one matrix after the other."""
    linear = model.get_submodule(name)
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, nn.Parameter))
    transposed = is_conv1d(linear)
    packed = NF4Linear(heights, weight.shape[not transposed], bias, double)
    if weight.device.type != "meta":
        for own, parameter in list(packed.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                values = torch.empty_like(parameter, device=weight.device)
                setattr(packed, own, nn.Parameter(values, requires_grad=False))
        dense = weight.detach().t() if transposed else weight.detach()
        for index, rows in enumerate(torch.split(dense, heights)):
            packed.quantize(index, rows)
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, packed)


class AdaptedFill:
    """Gives values to the parameters of a base with adapters: `base` knows those of the dense model by name.

    `model` is set before the first call. Without `base` values are those of training from the start.
    """

    model: Transformer

    def __init__(self, base: Fill | None, dtype: torch.dtype) -> None:
        self._base, self._dtype = base, dtype
        self._packed: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}

    def __call__(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        layer = path.partition(".adapter.")[0]
        module = self.model.get_submodule(path)
        if isinstance(module, NF4Linear) and own != "bias":
            if name not in self._packed:
                self._pack(path, module, parameter.device)
            parameter.copy_(self._packed.pop(name))
        elif isinstance(module, LoraPart) and own == "magnitude":
            parameter.copy_(self._norms[layer][module.start : module.end])
        elif isinstance(module, LoraPart):
            initialise(own, parameter)
        else:
            self._fill(name, parameter)
            if own == "weight":
                self._note_norms(path, parameter)

    def _fill(self, name: str, parameter: nn.Parameter) -> None:
        (self._base or self.model.initialise)(name, parameter)

    def _pack(self, path: str, linear: NF4Linear, device: torch.device) -> None:
        """The dense matrix lives until its packed bytes are there."""
        shape = (linear.out_features, linear.in_features)
        dense = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=device))
        self._fill(f"{path}.weight", dense)
        packed = NF4Linear(linear.rows, linear.in_features, None, linear.double_quantized)
        packed = packed.to_empty(device=device)
        for index, rows in enumerate(torch.split(dense.detach(), list(linear.rows))):
            packed.quantize(index, rows)
        del dense, rows
        self._packed |= {f"{path}.{own}": values for own, values in packed.named_parameters()}
        if self._has_magnitudes(path):
            self._note_norms(path, packed.dequantized(torch.float32))

    def _has_magnitudes(self, path: str) -> bool:
        adapter = getattr(self.model.get_submodule(path), "adapter", None)
        return isinstance(adapter, Lora) and adapter.dora

    def _note_norms(self, path: str, weight: Tensor) -> None:
        """DoRA's magnitudes begin as the norms of the rows."""
        if self._has_magnitudes(path):
            self._norms[path] = torch.linalg.vector_norm(weight.detach().float(), dim=1)


def trained_beside(config: Config, model: LanguageModel) -> set[str]:
    """The adapters and what `adapter.also_train` names. Raises UserError for a pattern that names nothing."""
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    base = [name for name, _ in model.named_parameters() if ADAPTER not in name]
    for pattern in filter(
        None, (part.strip() for part in (config.adapter.also_train or "").split(","))
    ):
        matching = {name for name in base if fnmatchcase(name, pattern)}
        if not matching:
            raise UserError(
                f"adapter.also_train={pattern}: names no parameter; there are {base[0]}, {base[-1]} and others"
            )
        found |= matching
    return found


def published_names(model: LanguageModel, family: Family | None) -> dict[tuple[str, str], str]:
    """(our layer, part) -> what Hugging Face calls that layer, of every adapter."""
    return {(site.module, site.part): site.path for site in sites_of(model, family)}
