"""Adapters in and out of peft's files."""

from pathlib import Path

from memtrain.engine.adapt import sites_of
from memtrain.errors import UserError
from memtrain.model.adapters import peft_format
from memtrain.model.adapters.lora import Lora, LoraOptions
from memtrain.model.adapters.peft_format import PeftAdapter
from memtrain.model.language_model import ADAPTER, LanguageModel
from memtrain.model.pretrained.families import Family
from memtrain.model.transformer import Transformer


def load_adapter(adapter: PeftAdapter, model: LanguageModel, family: Family | None) -> None:
    """Put peft's values into the adapters of `model`. Raises UserError for matrices that are left over, or left out."""
    names = parameter_names(model, family)
    parameters = dict(model.named_parameters())
    found = peft_format.tensors_of(adapter)
    for layer, own in names:
        if own and (layer, own) not in found:
            raise UserError(f"{adapter.folder}: no {own} for {layer} in it; get it again")
    for key, values in found.items():
        if key not in names:
            raise UserError(f"{adapter.folder}: {key[0]} has no counterpart in the model")
        parameter = parameters[names[key]]
        peft_format.check_shape(adapter.folder, key[0], values.shape, parameter.shape)
        model.set_weight(parameter, values.to(parameter.dtype))
        parameter.requires_grad_()  # what was trained whole, too


def write_peft(
    model: LanguageModel, family: Family | None, base: Path, options: LoraOptions, target: Path
) -> None:
    names = parameter_names(model, family)
    parameters = dict(model.named_parameters())
    trained = {key: name for key, name in names.items() if name in model.saved_parameters()}
    tensors = {key: model.weight(parameters[name]) for key, name in trained.items()}
    about = {
        "base_model_name_or_path": str(base),
        "fan_in_fan_out": family.transposed if family else False,
    }
    layers = [site.path for site in sites_of(model, family)]
    peft_format.write(target, tensors, options, layers, about)


def parameter_names(model: LanguageModel, family: Family | None) -> dict[tuple[str, str], str]:
    """(what Hugging Face calls the layer or parameter, a | b | magnitude | nothing for a whole one) -> our name."""
    found = {}
    for site in sites_of(model, family):
        adapter = getattr(model.get_submodule(site.module), "adapter", None)
        part = getattr(adapter, site.part, None) if isinstance(adapter, Lora) else None
        if part is not None:
            for own, _ in part.named_parameters():
                found[site.path, own] = f"{site.module}{ADAPTER}{site.part}.{own}"
    if isinstance(model, Transformer) and family is not None:
        for rows in family.rows(model.dimensions):
            if len(rows.ours) == len(rows.theirs) == 1 and not rows.transposed:
                found[rows.theirs[0], ""] = rows.ours[0]
        if (
            model.dimensions.tied
        ):  # peft would train a copy of the embedding, and leave the head what it was
            found["lm_head.weight", ""] = "embedding.weight"
    else:
        for name, _ in model.named_parameters():
            if ADAPTER not in name:
                found[name.removeprefix("lm."), ""] = name
    return found
